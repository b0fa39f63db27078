//! Addresses that this process listens on, as they come out of file, flags and variables: they have
//! no line.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use http::Uri;

use super::problem::{Problem, Refusal};
use super::process::{Process, Replicas};

/// Listeners whose address clashes with an earlier one. They are compared as they come out of
/// file, flags and variables, so they have no line.
pub(super) fn clashing(process: &Process) -> Vec<Problem> {
    let bound = bound(process);
    let file = process.shown_file();
    let problem = |(index, (path, address)): (usize, &(String, SocketAddr))| {
        let (other, taken) = bound.iter().take(index).find(|(_, other)| clash(*address, *other))?;
        let refusal = Refusal::new(&format!("{other} ({taken}) takes it"), "an address of its own");
        Some(Problem::new(&file, None, path, refusal, format!("{:?}", address.to_string())))
    };
    bound.iter().enumerate().filter_map(problem).collect()
}

/// Replicas that are a listener of this process: requests would come back to it.
pub(super) fn looping(process: &Process) -> Vec<Problem> {
    let bound = bound(process);
    let file = process.shown_file();
    let mut problems = Vec::new();
    for (index, backend) in process.backends.iter().enumerate() {
        let Replicas::Urls(urls) = &backend.replicas else { continue };
        for (number, url) in urls.iter().enumerate() {
            let Some(address) = here(url) else { continue };
            let Some((listener, _)) = bound.iter().find(|(_, bound)| clash(address, *bound)) else {
                continue;
            };
            let refusal = Refusal::new(&format!("{listener} is there"), "the address of a server");
            let path = format!("backends[{index}].replicas[{number}]");
            problems.push(Problem::new(&file, None, &path, refusal, format!("{:?}", url.to_string())));
        }
    }
    problems
}

/// The address of a URL that names this machine as such; `None` for other hosts.
fn here(url: &Uri) -> Option<SocketAddr> {
    let host = url.host()?.trim_start_matches('[').trim_end_matches(']');
    let ip = if host == "localhost" { Ok(Ipv4Addr::LOCALHOST.into()) } else { host.parse::<IpAddr>() };
    let ip = ip.ok().filter(|ip| ip.is_loopback() || ip.is_unspecified())?;
    let port = url.port_u16().unwrap_or(if url.scheme_str() == Some("https") { 443 } else { 80 });
    Some(SocketAddr::new(ip, port))
}

/// The listeners, each with the path of its setting.
fn bound(process: &Process) -> Vec<(String, SocketAddr)> {
    let listen = process.listen.iter().enumerate();
    let mut bound: Vec<(String, SocketAddr)> =
        listen.map(|(index, listen)| (format!("listen[{index}].address"), listen.address)).collect();
    bound.push(("admin.address".to_owned(), process.admin.address));
    bound.extend(process.metrics.address.map(|address| ("metrics.address".to_owned(), address)));
    bound
}

/// True if two sockets cannot listen on these addresses at the same time. `[::]` takes the port of
/// IPv4 as well.
fn clash(one: SocketAddr, other: SocketAddr) -> bool {
    let takes = |all: IpAddr, one: IpAddr| all.is_unspecified() && (all.is_ipv6() || one.is_ipv4());
    let same = one.ip() == other.ip() || takes(one.ip(), other.ip()) || takes(other.ip(), one.ip());
    same && one.port() == other.port() && one.port() != 0
}
