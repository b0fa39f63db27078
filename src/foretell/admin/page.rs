//! The status page: files in the binary, with headers that restrict them to requests to this API.
//!
//! They contain no state. The page requests all of its data, with the token if one is required.

use http::header::{CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY};
use http::{HeaderName, HeaderValue, Response};

use foretell_net::http::body::{Body, full};

/// Only scripts and styles of this listener, requests to it alone, and no page around it.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
const RESOURCE_POLICY: HeaderName = HeaderName::from_static("cross-origin-resource-policy");
const OPENER_POLICY: HeaderName = HeaderName::from_static("cross-origin-opener-policy");

const HTML: &str = "text/html; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

#[derive(Clone, Copy, Debug)]
pub(super) struct File {
    path: &'static str,
    kind: &'static str,
    text: &'static str,
}

/// Every file of the page.
const FILES: [File; 9] = [
    File { path: "/", kind: HTML, text: include_str!("page/index.html") },
    File { path: "/style.css", kind: STYLE, text: include_str!("page/style.css") },
    File { path: "/page.js", kind: SCRIPT, text: include_str!("page/page.js") },
    File { path: "/api.js", kind: SCRIPT, text: include_str!("page/api.js") },
    File { path: "/dom.js", kind: SCRIPT, text: include_str!("page/dom.js") },
    File { path: "/charts.js", kind: SCRIPT, text: include_str!("page/charts.js") },
    File { path: "/sections.js", kind: SCRIPT, text: include_str!("page/sections.js") },
    File { path: "/sessions.js", kind: SCRIPT, text: include_str!("page/sessions.js") },
    File { path: "/switches.js", kind: SCRIPT, text: include_str!("page/switches.js") },
];

pub(super) fn file(path: &str) -> Option<File> {
    FILES.into_iter().find(|file| file.path == path)
}

impl File {
    /// The answer that carries it.
    pub(super) fn response(self) -> Response<Body> {
        let mut response = Response::new(full(self.text));
        let headers = [
            (CONTENT_TYPE, self.kind),
            (CONTENT_SECURITY_POLICY, POLICY),
            (REFERRER_POLICY, "no-referrer"),
            (RESOURCE_POLICY, "same-origin"),
            (OPENER_POLICY, "same-origin"),
        ];
        response.headers_mut().extend(headers.map(|(name, value)| (name, HeaderValue::from_static(value))));
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_names_no_file_that_is_not_there_and_nothing_that_its_policy_forbids() {
        let index = file("/").unwrap().text;
        for word in ["http://", "https://", "style=", "<style", "onclick", "javascript:"] {
            assert!(!index.contains(word), "{word}");
        }
        let scripts = FILES.iter().filter(|file| file.kind == SCRIPT);
        let imports = scripts.flat_map(|file| file.text.lines()).filter_map(|line| {
            let path = line.strip_prefix("import ")?.split_once(" from \"./")?.1;
            path.strip_suffix("\";")
        });
        let named =
            index.split('"').filter_map(|word| word.strip_prefix('/')).filter(|word| !word.is_empty());
        let named: Vec<&str> = imports.chain(named).filter(|path| !path.starts_with("api/")).collect();
        assert!(named.len() > FILES.len(), "{named:?}");
        for path in named {
            assert!(path == "metrics" || file(&format!("/{path}")).is_some(), "{path}");
        }
    }

    #[test]
    fn no_script_makes_markup_of_text() {
        for script in FILES.iter().filter(|file| file.kind == SCRIPT) {
            for word in
                ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "localStorage"]
            {
                assert!(!script.text.contains(word), "{}: {word}", script.path);
            }
        }
    }
}
