//! Servers that get passthrough requests only: the client gets the server's own answer, and the
//! server gets no request that it should not get.

mod engines;
mod hosted;
mod house;
