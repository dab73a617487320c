//! Bounded reading of sysfs attributes: whatever stands in a file, the reader ends, allocates
//! little, and remembers what was wrong instead of failing as a whole.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// Most bytes read of one attribute. The kernel never shows more than one page, and the smallest
/// page Linux has is 4 KiB.
const MAX_FILE_BYTES: u64 = 4096;

/// Most faults kept. A broken tree repeats itself; the first few dozen are enough to mend it.
const MAX_FAULTS: usize = 128;

/// Something in the tree that could not be understood. The rest of the inventory stands.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Fault {
    /// The file or directory.
    pub path: PathBuf,
    /// What was wrong with it.
    pub kind: FaultKind,
}

/// What was wrong with a file of the tree.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum FaultKind {
    /// It could not be opened or read.
    Unreadable(io::ErrorKind),
    /// It is longer than any sysfs attribute.
    TooLarge,
    /// Its contents, or its name, are not UTF-8.
    NotText,
    /// Its contents, or its name, are not what the kernel writes there.
    Malformed {
        /// What was expected.
        expected: &'static str,
    },
    /// A directory has more entries than any real device shows; those after the limit were not
    /// read.
    TooMany {
        /// The limit.
        limit: usize,
    },
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.path.display())?;
        match &self.kind {
            FaultKind::Unreadable(kind) => write!(f, "cannot be read ({kind})"),
            FaultKind::TooLarge => write!(f, "is longer than {MAX_FILE_BYTES} bytes"),
            FaultKind::NotText => write!(f, "is not UTF-8"),
            FaultKind::Malformed { expected } => write!(f, "is not {expected}"),
            FaultKind::TooMany { limit } => write!(f, "has more than {limit} entries"),
        }
    }
}

/// Whether the absence of a file is worth a [`Fault`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Absent {
    /// Some drivers or kernels do not have it.
    Fine,
    /// Every driver has it.
    Fault,
}

/// Reads attributes and collects what was wrong.
#[derive(Debug, Default)]
pub(crate) struct Reader {
    pub(crate) faults: Vec<Fault>,
    pub(crate) faults_dropped: usize,
}

impl Reader {
    pub(crate) fn fault(&mut self, path: &Path, kind: FaultKind) {
        if self.faults.len() < MAX_FAULTS {
            self.faults.push(Fault { path: path.to_path_buf(), kind });
        } else {
            self.faults_dropped += 1;
        }
    }

    /// The trimmed text of `path`, or `None` and a fault.
    pub(crate) fn text(&mut self, path: &Path, absent: Absent) -> Option<String> {
        match read_bounded(path) {
            Ok(text) => Some(text),
            Err(FaultKind::Unreadable(io::ErrorKind::NotFound)) if absent == Absent::Fine => None,
            Err(kind) => {
                self.fault(path, kind);
                None
            }
        }
    }

    /// The text of `path` put through `parse`; `expected` describes what `parse` accepts.
    pub(crate) fn value<T>(
        &mut self,
        path: &Path,
        absent: Absent,
        expected: &'static str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Option<T> {
        let text = self.text(path, absent)?;
        let value = parse(&text);
        if value.is_none() {
            self.fault(path, FaultKind::Malformed { expected });
        }
        value
    }

    /// Names of the entries of `dir` that are UTF-8, unsorted, at most `limit` of them.
    ///
    /// # Errors
    /// The directory cannot be opened.
    pub(crate) fn names(&mut self, dir: &Path, limit: usize) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(dir)? {
            let entry = match entry {
                Ok(entry) => entry,
                Err(error) => {
                    self.fault(dir, FaultKind::Unreadable(error.kind()));
                    break;
                }
            };
            if names.len() == limit {
                self.fault(dir, FaultKind::TooMany { limit });
                break;
            }
            match entry.file_name().into_string() {
                Ok(name) => names.push(name),
                Err(name) => self.fault(&dir.join(name), FaultKind::NotText),
            }
        }
        Ok(names)
    }

    /// The entries of `dir` whose names are numbers, ascending. A missing or unreadable directory
    /// is empty, with a fault as `absent` says; a name that is no number is a fault.
    pub(crate) fn numbers(&mut self, dir: &Path, absent: Absent, limit: usize) -> Vec<u32> {
        let names = match self.names(dir, limit) {
            Ok(names) => names,
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound || absent == Absent::Fault {
                    self.fault(dir, FaultKind::Unreadable(error.kind()));
                }
                return Vec::new();
            }
        };
        let mut numbers = Vec::with_capacity(names.len());
        for name in names {
            match name.parse() {
                Ok(number) => numbers.push(number),
                Err(_) => {
                    self.fault(&dir.join(name), FaultKind::Malformed { expected: "a number" });
                }
            }
        }
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    }
}

fn read_bounded(path: &Path) -> Result<String, FaultKind> {
    let unreadable = |error: io::Error| FaultKind::Unreadable(error.kind());
    // NONBLOCK, so that a pipe in an invented tree cannot hold the reader up; it means nothing to
    // a sysfs file.
    let file: File = OpenOptions::new()
        .read(true)
        .custom_flags(rustix::fs::OFlags::NONBLOCK.bits().cast_signed())
        .open(path)
        .map_err(unreadable)?;
    let mut bytes = Vec::new();
    let mut bounded = file.take(MAX_FILE_BYTES + 1);
    bounded.read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(FaultKind::TooLarge);
    }
    let text = String::from_utf8(bytes).map_err(|_| FaultKind::NotText)?;
    Ok(text.trim().to_owned())
}

/// The PCI function at or above what `device` links to: the function itself for most drivers, an
/// ancestor for scalable functions, which are auxiliary devices below it.
pub(crate) fn pci_function(device: &Path) -> Option<(PathBuf, String)> {
    let path = fs::canonicalize(device).ok()?;
    path.ancestors().find_map(|ancestor| {
        let name = ancestor.file_name()?.to_str()?;
        is_pci_address(name).then(|| (ancestor.to_path_buf(), name.to_owned()))
    })
}

/// `dddd:bb:dd.f`, the domain with more digits where the platform has that many.
fn is_pci_address(name: &str) -> bool {
    let hex = |text: &str, digits: std::ops::RangeInclusive<usize>| {
        digits.contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    let mut parts = name.split(':');
    let (Some(domain), Some(bus), Some(rest), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return false;
    };
    let Some((device, function)) = rest.split_once('.') else { return false };
    hex(domain, 4..=8) && hex(bus, 2..=2) && hex(device, 2..=2) && hex(function, 1..=1)
}
