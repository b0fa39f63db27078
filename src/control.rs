//! What has been learnt, and what it says to do next: survival of drafts, costs of calls, leap or ride.
//!
//! PURE.
