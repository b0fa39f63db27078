//! Counts the bytes that parsers read, so that tests can tell work that grows with an output from
//! work that grows with its square, however busy the machine is. Outside tests it does nothing.

#[cfg(test)]
use std::cell::Cell;

#[cfg(test)]
thread_local! {
    static READ: Cell<u64> = const { Cell::new(0) };
}

/// Counts bytes that were read, and the call itself.
#[cfg(test)]
pub(super) fn read(bytes: usize) {
    READ.set(READ.get() + 1 + bytes as u64);
}

/// See above.
#[cfg(not(test))]
pub(super) const fn read(_: usize) {}

/// Bytes that this thread has read while `act` ran.
#[cfg(test)]
pub(super) fn of(act: impl FnOnce()) -> u64 {
    let before = READ.get();
    act();
    READ.get() - before
}
