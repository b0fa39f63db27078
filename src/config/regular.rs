//! Reads regular files only: opening a FIFO waits for its writer, and a device may never end.

use std::fs::{File, FileType, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;

/// The content of a regular file of at most `max_bytes`, and its metadata. Never blocks on other
/// file types.
///
/// # Errors
/// It cannot be read, is not a regular file ([`ErrorKind::InvalidInput`]) or too large
/// ([`ErrorKind::FileTooLarge`]).
pub fn read(path: &Path, max_bytes: u64) -> io::Result<(Vec<u8>, Metadata)> {
    // Opening a device can have effects, so its type is checked first, and that of the opened file
    // again.
    check(&std::fs::metadata(path)?)?;
    let file =
        OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits().cast_signed()).open(path)?;
    let metadata = file.metadata()?;
    check(&metadata)?;
    Ok((bounded(&file, &metadata, max_bytes)?, metadata))
}

/// Checks that this is a regular file.
///
/// # Errors
/// It is not; the error names its type.
pub fn check(metadata: &Metadata) -> io::Result<()> {
    if metadata.is_file() {
        return Ok(());
    }
    let what = name(metadata.file_type());
    Err(io::Error::new(ErrorKind::InvalidInput, format!("it is {what}, not a regular file")))
}

fn bounded(file: &File, metadata: &Metadata, max_bytes: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if metadata.len() <= max_bytes {
        // It may grow while it is read.
        file.take(max_bytes.saturating_add(1)).read_to_end(&mut bytes)?;
    }
    if metadata.len().max(bytes.len() as u64) > max_bytes {
        return Err(io::Error::new(ErrorKind::FileTooLarge, format!("it has more than {max_bytes} bytes")));
    }
    Ok(bytes)
}

fn name(kind: FileType) -> &'static str {
    match kind {
        _ if kind.is_dir() => "a folder",
        _ if kind.is_fifo() => "a FIFO",
        _ if kind.is_socket() => "a socket",
        _ => "a device",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_regular_file_of_the_allowed_size_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("file"), "abc").unwrap();
        std::os::unix::fs::symlink("file", at("link")).unwrap();
        std::os::unix::fs::symlink("nowhere", at("dangling")).unwrap();
        std::os::unix::fs::symlink("loop", at("loop")).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(at("fifo")).status().unwrap().success());
        for name in ["file", "link"] {
            assert_eq!(read(&at(name), 3).unwrap().0, b"abc");
            assert_eq!(read(&at(name), 2).unwrap_err().kind(), ErrorKind::FileTooLarge);
        }
        for name in ["dangling", "loop"] {
            assert!(read(&at(name), 3).is_err(), "{name}");
        }
        for (path, what) in
            [(at("fifo"), "a FIFO"), (folder.path().to_owned(), "a folder"), ("/dev/zero".into(), "a device")]
        {
            let error = read(&path, 3).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            assert!(error.to_string().contains(what), "{error}");
        }
    }
}
