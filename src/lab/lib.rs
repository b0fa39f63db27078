//! The developers' laboratory: what measures Foretell's parts without a server behind it.
//!
//! | module | purpose |
//! |---|---|
//! | [`sim`] | a fleet in virtual time, with the controller and the sessions of the product |
//! | [`replay`] | drafters over recorded texts |
//! | [`commands`] | the commands of `foretell-lab` |

pub mod commands;
pub mod replay;
pub mod sim;
