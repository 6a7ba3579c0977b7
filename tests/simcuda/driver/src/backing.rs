//! Host memory behind the devices.
//!
//! Each device is one sparse file in memory. A block of device memory is an extent of that file, mapped where it is needed, so
//! that one block can have two addresses, or be mapped by another process. Extents are never reused: the file is sparse, and
//! a freed extent gives its pages back by a hole. Plain allocations live in one reserved range of addresses, lowest address
//! first, so that freed addresses come back as they do on a real device.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;

pub const PAGE: u64 = 4096;
const FILE_BYTES: i64 = 1 << 50;
/// Address space set aside for plain allocations.
const ARENA_BYTES: usize = 1 << 40;

/// The file of a device, this process's or (opened from a handle) another's.
pub struct DeviceFile {
    fd: OwnedFd,
}

/// Bytes of a device's file.
#[derive(Clone)]
pub struct Extent {
    pub file: Arc<DeviceFile>,
    pub offset: u64,
    pub bytes: u64,
}

impl DeviceFile {
    pub fn create(ordinal: i32) -> DeviceFile {
        let name = CString::new(format!("{NAME}{ordinal}")).expect("no NUL inside");
        // SAFETY: `name` is a C string; the new descriptor is owned by nobody else.
        unsafe {
            let fd = libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC);
            assert!(fd >= 0 && libc::ftruncate(fd, FILE_BYTES) == 0, "memory for device {ordinal}");
            DeviceFile { fd: OwnedFd::from_raw_fd(fd) }
        }
    }

    /// Takes over a descriptor that names some process's device; None when it does not.
    pub fn adopt(fd: OwnedFd) -> Option<(DeviceFile, i32)> {
        let target = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok()?;
        let rest = target.to_str()?.strip_prefix("/memfd:")?.strip_prefix(NAME)?;
        let ordinal = rest.split(' ').next()?.parse().ok()?;
        Some((DeviceFile { fd }, ordinal))
    }

    /// A new, independent open file description of the same file.
    pub fn reopen(&self) -> Option<OwnedFd> {
        open(&format!("/proc/self/fd/{}", self.fd()))
    }

    pub fn is_same(&self, other: &DeviceFile) -> bool {
        inode(self.fd()) == inode(other.fd())
    }

    pub fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

const NAME: &str = "simcuda-device-";

pub fn open(path: &str) -> Option<OwnedFd> {
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path).ok()?;
    Some(file.into())
}

fn inode(fd: RawFd) -> (u64, u64) {
    // SAFETY: `stat` is plain data that fstat fills.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        libc::fstat(fd, &mut stat);
        (stat.st_dev, stat.st_ino)
    }
}

impl Extent {
    /// Maps it at `address`, over whatever reservation is there.
    pub fn map_at(&self, address: u64, protection: i32) -> bool {
        // SAFETY: callers own [address, address + bytes): it lies in the arena or in a reservation of the program.
        let at = unsafe {
            libc::mmap(
                address as *mut _,
                self.bytes as usize,
                protection,
                libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_NORESERVE,
                self.file.fd(),
                self.offset as i64,
            )
        };
        let mapped = at as u64 == address;
        if mapped {
            // A forked child has no device, hence no device memory.
            // SAFETY: the range was just mapped.
            unsafe { libc::madvise(at, self.bytes as usize, libc::MADV_DONTFORK) };
        }
        mapped
    }

    /// Gives its pages back to the host. Its bytes read as zero from then on.
    pub fn discard(&self) {
        // SAFETY: no memory of this process's own is involved.
        unsafe {
            libc::fallocate(
                self.file.fd(),
                libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
                self.offset as i64,
                self.bytes as i64,
            )
        };
    }
}

/// Address space without memory, aligned to `align` (a power of two, at least a page). Any access faults.
pub fn reserve(bytes: usize, align: usize, hint: u64) -> Option<u64> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: new mappings only: FIXED_NOREPLACE never replaces one, and what is unmapped was mapped here.
    unsafe {
        if hint != 0 && hint.is_multiple_of(align as u64) {
            let at = libc::mmap(hint as *mut _, bytes, libc::PROT_NONE, flags | libc::MAP_FIXED_NOREPLACE, -1, 0);
            if at as u64 == hint {
                return Some(hint);
            }
            if at != libc::MAP_FAILED {
                libc::munmap(at, bytes);
            }
        }
        let total = bytes.checked_add(align)?;
        let at = libc::mmap(std::ptr::null_mut(), total, libc::PROT_NONE, flags, -1, 0);
        if at == libc::MAP_FAILED {
            return None;
        }
        let start = at as usize;
        let base = start.next_multiple_of(align);
        if base > start {
            libc::munmap(at, base - start);
        }
        libc::munmap((base + bytes) as *mut _, start + total - (base + bytes));
        Some(base as u64)
    }
}

/// Makes mapped addresses fault again and keeps them reserved.
pub fn vacate(address: u64, bytes: u64) {
    // SAFETY: callers own the range: it lies in the arena or in a reservation of the program.
    let at = unsafe {
        libc::mmap(
            address as *mut _,
            bytes as usize,
            libc::PROT_NONE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED,
            -1,
            0,
        )
    };
    assert_eq!(at as u64, address, "the host cannot unmap: too many mappings?");
}

pub fn unreserve(address: u64, bytes: u64) {
    // SAFETY: callers own the range and give it up.
    unsafe { libc::munmap(address as *mut _, bytes as usize) };
}

/// Memory of the host, zeroed as it is touched.
pub fn host_pages(bytes: usize) -> Option<u64> {
    // SAFETY: a new mapping.
    let at = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    (at != libc::MAP_FAILED).then_some(at as u64)
}

/// The range of addresses that plain allocations live in.
pub struct Arena {
    /// Free ranges by base.
    free: BTreeMap<u64, u64>,
}

impl Arena {
    pub fn new() -> Arena {
        let base = reserve(ARENA_BYTES, 2 << 20, 0).expect("address space for device memory");
        Arena { free: BTreeMap::from([(base, ARENA_BYTES as u64)]) }
    }

    /// The lowest free range of `bytes` (whole pages) aligned to `align`.
    pub fn take(&mut self, bytes: u64, align: u64) -> Option<u64> {
        let (start, size, base) = self.free.iter().find_map(|(&start, &size)| {
            let base = start.next_multiple_of(align);
            (base.checked_add(bytes)? <= start + size).then_some((start, size, base))
        })?;
        self.free.remove(&start);
        if base > start {
            self.free.insert(start, base - start);
        }
        if base + bytes < start + size {
            self.free.insert(base + bytes, start + size - (base + bytes));
        }
        Some(base)
    }

    pub fn give(&mut self, mut base: u64, mut bytes: u64) {
        if let Some(after) = self.free.remove(&(base + bytes)) {
            bytes += after;
        }
        if let Some((&before, &size)) = self.free.range(..base).next_back()
            && before + size == base
        {
            base = before;
            bytes += size;
        }
        self.free.insert(base, bytes);
    }
}
