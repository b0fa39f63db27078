//! Ties a request to the process that it began on: by a page that only that process answers with
//! this content.
//!
//! The process behind an address may change at any time: rolling updates, service changes. A
//! connection leads to one process as long as it lasts. So each new connection is checked once,
//! before a request that belongs to a certain process is sent over it.

use std::fmt;
use std::sync::Arc;

use http::Uri;

/// The test of a page's text.
type Names = Box<dyn Fn(Vec<u8>) -> bool + Send + Sync>;

/// The test that a connection leads to a certain process.
pub struct Tie {
    page: Uri,
    names: Names,
}

impl Tie {
    /// The process whose `page` passes the test `names`.
    pub fn new(page: Uri, names: impl Fn(Vec<u8>) -> bool + Send + Sync + 'static) -> Self {
        Self { page, names: Box::new(names) }
    }

    pub(super) fn page(&self) -> &Uri {
        &self.page
    }

    /// True if `page` is an answer of this process.
    pub(super) fn names(&self, page: Vec<u8>) -> bool {
        (self.names)(page)
    }
}

/// Extension of a request that must reach this process or none.
#[derive(Clone, Debug)]
pub struct Tied {
    pub to: Arc<Tie>,
    /// True if a new connection may take as long to identify its process as the caller waits for
    /// the answer: a busy server sends its page late. Otherwise the limit is `connect_timeout`.
    pub patient: bool,
}

impl fmt::Debug for Tie {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tie").field("page", &self.page).finish_non_exhaustive()
    }
}
