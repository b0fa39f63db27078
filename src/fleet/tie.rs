//! What ties a request to the process that it began on: a page which that process alone answers as it does.
//!
//! The process behind an address may be another one at any time: rolling updates, service flips. A connection leads to
//! one process for as long as it lasts. So each new connection is asked once, before a request that belongs to a certain
//! process goes over it.

use std::fmt;
use std::sync::Arc;

use http::Uri;

/// The test of a page's text.
type Names = Box<dyn Fn(Vec<u8>) -> bool + Send + Sync>;

/// How a connection shows which process it leads to.
pub struct Tie {
    page: Uri,
    names: Names,
}

impl Tie {
    /// The process whose `page` passes the test `names`.
    pub fn new(page: Uri, names: impl Fn(Vec<u8>) -> bool + Send + Sync + 'static) -> Self {
        Self { page, names: Box::new(names) }
    }

    /// The page to ask for.
    pub(super) fn page(&self) -> &Uri {
        &self.page
    }

    /// Whether the process that has answered so is this one.
    pub(super) fn names(&self, page: Vec<u8>) -> bool {
        (self.names)(page)
    }
}

/// Extension of a request that must reach this process or none.
#[derive(Clone, Debug)]
pub struct Tied {
    /// The process.
    pub to: Arc<Tie>,
    /// A new connection may take as long to show where it leads as the caller waits for the answer: a server that is busy shows
    /// its page late. Otherwise `connect_timeout`.
    pub patient: bool,
}

impl fmt::Debug for Tie {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tie").field("page", &self.page).finish_non_exhaustive()
    }
}
