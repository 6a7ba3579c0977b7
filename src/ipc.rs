//! Blocks of a pool that another process opens. Pages have no `cuIpcGetMemHandle` (it answers 1), so between two processes that both
//! run under gpupool the handle is ours: it names the exporter's socket and the block, and the opener is sent the pages' descriptors.
//!
//! * The handle (64 bytes, as CUDA's) begins with words that no driver makes. A process without gpupool gets an error from its driver.
//! * The socket is abstract, named by process and a random token that the handle carries; both ends check that the other is the same
//!   user. Every step has a time limit: an exporter that is gone is an error at once, one that hangs an error after five seconds.
//! * The pages of a shared block take no new blocks and stay where they are until it is freed (`Pool::share`).
//!
//! One thread answers openers, from the first export on.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

use once_cell::sync::{Lazy, OnceCell};
use parking_lot::Mutex;

use crate::driver::{self, CuError, CuResult, DevicePtr, Driver, PageHandle};
use crate::source::Shareable;

const MAGIC: [u8; 8] = *b"gpupool\x01";
const LIMIT: Duration = Duration::from_secs(5);
/// Descriptors in one message; the kernel takes 253.
const BATCH: usize = 64;

/// What a handle says, in the order of its bytes after the magic.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Handle {
    pid: u64,
    token: u64,
    key: u64,
    offset: u64,
    size: u64,
}

impl Handle {
    fn bytes(self) -> [u8; 64] {
        let mut out = [0; 64];
        out[..8].copy_from_slice(&MAGIC);
        let words = [self.pid, self.token, self.key, self.offset, self.size];
        let sum = words.iter().fold(0u64, |sum, w| sum.rotate_left(7) ^ w);
        for (i, word) in words.into_iter().chain([sum]).enumerate() {
            out[8 + 8 * i..16 + 8 * i].copy_from_slice(&word.to_le_bytes());
        }
        out
    }

    fn parse(bytes: &[u8; 64]) -> Option<Handle> {
        let word = |i: usize| Some(u64::from_le_bytes(bytes.get(8 + 8 * i..16 + 8 * i)?.try_into().ok()?));
        let (pid, token, key, offset, size) = (word(0)?, word(1)?, word(2)?, word(3)?, word(4)?);
        let handle = Handle { pid, token, key, offset, size };
        (is_ours(bytes) && handle.bytes() == *bytes).then_some(handle)
    }
}

/// Whether a handle is one of these, whole or not.
pub fn is_ours(bytes: &[u8; 64]) -> bool {
    bytes[..8] == MAGIC
}

fn name(pid: u64, token: u64) -> std::io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("gpupool-{pid}-{token:016x}"))
}

// ---- the exporter ----

struct Export {
    /// The pages' descriptors and bytes.
    pages: Vec<(OwnedFd, u64)>,
    handle: Handle,
}

static EXPORTS: Lazy<Mutex<HashMap<u64, Export>>> = Lazy::new(Default::default);

/// A handle for a block; `key` is a number that no other block has. The pages' descriptors are kept until `withdraw`.
pub fn publish(d: &'static Driver, block: Shareable, key: u64) -> CuResult<[u8; 64]> {
    let token = serve()?;
    if let Some(known) = EXPORTS.lock().get(&key) {
        return Ok(known.handle.bytes());
    }
    let mut pages = Vec::with_capacity(block.pages.len());
    for (handle, size) in block.pages {
        let fd = d.page_export(handle)?;
        // SAFETY: a descriptor that the driver just made for us.
        pages.push((unsafe { OwnedFd::from_raw_fd(fd) }, size as u64));
    }
    let pid = std::process::id().into();
    let handle = Handle { pid, token, key, offset: block.offset as u64, size: block.size as u64 };
    EXPORTS.lock().insert(key, Export { pages, handle });
    Ok(handle.bytes())
}

/// The block was freed: it can be opened no more.
pub fn withdraw(key: u64) {
    EXPORTS.lock().remove(&key);
}

/// Starts the thread that answers, once a process; the token of its socket.
fn serve() -> CuResult<u64> {
    static TOKEN: OnceCell<u64> = OnceCell::new();
    let start = || {
        let mut token = [0u8; 8];
        std::fs::File::open("/dev/urandom")?.read_exact(&mut token)?;
        let token = u64::from_le_bytes(token);
        let listener = UnixListener::bind_addr(&name(std::process::id().into(), token)?)?;
        crate::thread::background("gpupool-ipc", move || {
            for opener in listener.incoming().flatten() {
                if driver::is_exiting() {
                    return;
                }
                if let Err(e) = answer(opener, token) {
                    log::debug!("an opener was sent away: {e}");
                }
            }
        })?;
        Ok(token)
    };
    TOKEN.get_or_try_init(start).copied().map_err(|e: std::io::Error| {
        log::warn!("blocks cannot be shared with other processes: {e}");
        CuError::NOT_SUPPORTED
    })
}

/// Request: token and key. Answer: the number of pages and their sizes, then their descriptors; nothing to who has no business here.
fn answer(mut opener: UnixStream, token: u64) -> std::io::Result<()> {
    limit(&opener)?;
    if !same_user(&opener) {
        return Err(std::io::ErrorKind::PermissionDenied.into());
    }
    let mut request = [0u8; 16];
    opener.read_exact(&mut request)?;
    let word = |i: usize| u64::from_le_bytes(request[8 * i..8 * i + 8].try_into().expect("eight bytes"));
    if word(0) != token {
        return Err(std::io::ErrorKind::PermissionDenied.into());
    }
    let pages: Vec<(OwnedFd, u64)> = {
        let exports = EXPORTS.lock();
        let Some(export) = exports.get(&word(1)) else { return Err(std::io::ErrorKind::NotFound.into()) };
        let copies = export.pages.iter().map(|(fd, size)| Ok((fd.try_clone()?, *size)));
        copies.collect::<std::io::Result<_>>()?
    };
    opener.write_all(&(pages.len() as u64).to_le_bytes())?;
    for (_, size) in &pages {
        opener.write_all(&size.to_le_bytes())?;
    }
    for batch in pages.chunks(BATCH) {
        let fds: Vec<RawFd> = batch.iter().map(|(fd, _)| fd.as_raw_fd()).collect();
        send(&opener, &fds)?;
    }
    Ok(())
}

// ---- the opener ----

struct Opened {
    handle: Handle,
    /// The mapping, and the block in it.
    base: DevicePtr,
    bytes: usize,
    parts: Vec<(PageHandle, usize)>,
    times: usize,
}

/// By the block's address.
static OPENED: Lazy<Mutex<HashMap<DevicePtr, Opened>>> = Lazy::new(Default::default);

/// Maps the block of a handle for the current context's device. The same handle again gives the same address. `INVALID_HANDLE` (400) for
/// a damaged one, and when the block or its process is gone; 201 in the process that made it, as the driver answers.
pub fn open(d: &'static Driver, bytes: &[u8; 64]) -> CuResult<DevicePtr> {
    let handle = Handle::parse(bytes).ok_or(CuError::INVALID_HANDLE)?;
    if handle.pid == u64::from(std::process::id()) && EXPORTS.lock().contains_key(&handle.key) {
        return Err(CuError::INVALID_CONTEXT);
    }
    let again = |p: &DevicePtr, opened: &mut Opened| {
        opened.times += 1;
        *p
    };
    let known = |all: &mut HashMap<DevicePtr, Opened>| {
        all.iter_mut().find(|(_, opened)| opened.handle == handle).map(|(p, opened)| again(p, opened))
    };
    if let Some(p) = known(&mut OPENED.lock()) {
        return Ok(p);
    }
    let pages = fetch(&handle).map_err(|e| {
        log::info!("a block of process {} cannot be opened: {e}", handle.pid);
        CuError::INVALID_HANDLE
    })?;
    let total: u64 = pages.iter().map(|p| p.1).sum();
    if handle.offset.checked_add(handle.size).is_none_or(|end| end > total) {
        return Err(CuError::INVALID_HANDLE);
    }
    let mut opened = Opened { handle, base: 0, bytes: total as usize, parts: Vec::new(), times: 1 };
    if let Err(e) = map(d, &pages, &mut opened) {
        log::info!("a block of process {} cannot be mapped: {e:?}", handle.pid);
        let _ = unmap(d, opened);
        return Err(e);
    }
    let p = opened.base + handle.offset;
    let mut all = OPENED.lock();
    // Another thread may have been as fast.
    if let Some(other) = known(&mut all) {
        drop(all);
        let _ = unmap(d, opened);
        return Ok(other);
    }
    all.insert(p, opened);
    Ok(p)
}

fn map(d: &Driver, pages: &[(OwnedFd, u64)], opened: &mut Opened) -> CuResult<()> {
    let ordinal = d.ctx_device()?;
    let base = d.va_reserve(opened.bytes)?;
    opened.base = base;
    let mut at = base;
    for (fd, size) in pages {
        let handle = d.page_import(fd.as_raw_fd())?;
        if let Err(e) = d.page_map(at, *size as usize, handle) {
            let _ = d.page_release(handle);
            return Err(e);
        }
        opened.parts.push((handle, *size as usize));
        at += size;
    }
    d.page_access(base, opened.bytes, &[ordinal])
}

fn unmap(d: &Driver, opened: Opened) -> CuResult<()> {
    let mut first = Ok(());
    let mut at = opened.base;
    for (handle, size) in opened.parts {
        let unmapped = d.page_unmap(at, size);
        let released = d.page_release(handle);
        first = first.and(unmapped).and(released);
        at += size as u64;
    }
    if opened.base != 0 && first.is_ok() {
        first = d.va_free(opened.base, opened.bytes);
    }
    first
}

/// Closes an opened block; it is unmapped with the last close. None: `p` was not opened here.
pub fn close(d: &'static Driver, p: DevicePtr) -> Option<CuResult<()>> {
    let mut all = OPENED.lock();
    let opened = all.get_mut(&p)?;
    opened.times -= 1;
    if opened.times > 0 {
        return Some(Ok(()));
    }
    let opened = all.remove(&p)?;
    drop(all);
    // As the driver's own close: the program says that it is done, its work may not be.
    let waited = d.ctx_synchronize();
    Some(waited.and(unmap(d, opened)))
}

/// Start and bytes of the opened block that holds `p`.
pub fn range_of(p: DevicePtr) -> Option<(DevicePtr, usize)> {
    let all = OPENED.lock();
    all.iter()
        .map(|(&start, o)| (start, o.handle.size as usize))
        .find(|&(start, n)| (start..start + n as u64).contains(&p))
}

fn fetch(handle: &Handle) -> std::io::Result<Vec<(OwnedFd, u64)>> {
    let bad = || std::io::Error::from(std::io::ErrorKind::InvalidData);
    let mut exporter = UnixStream::connect_addr(&name(handle.pid, handle.token)?)?;
    limit(&exporter)?;
    if !same_user(&exporter) {
        return Err(std::io::ErrorKind::PermissionDenied.into());
    }
    exporter.write_all(&[handle.token.to_le_bytes(), handle.key.to_le_bytes()].concat())?;
    let mut word = || {
        let mut bytes = [0u8; 8];
        exporter.read_exact(&mut bytes).map(|()| u64::from_le_bytes(bytes))
    };
    let count = word()? as usize;
    // A block of a PiB has as many pages of 32 MiB.
    if count == 0 || count > 1 << 25 {
        return Err(bad());
    }
    let sizes = (0..count).map(|_| word()).collect::<std::io::Result<Vec<u64>>>()?;
    let mut fds = Vec::new();
    while fds.len() < count {
        let got = receive(&exporter)?;
        if got.is_empty() {
            return Err(bad());
        }
        fds.extend(got);
    }
    Ok(fds.into_iter().zip(sizes).collect())
}

// ---- sockets ----

fn limit(s: &UnixStream) -> std::io::Result<()> {
    s.set_read_timeout(Some(LIMIT))?;
    s.set_write_timeout(Some(LIMIT))
}

fn same_user(s: &UnixStream) -> bool {
    let mut peer = libc::ucred { pid: 0, uid: libc::uid_t::MAX, gid: libc::gid_t::MAX };
    let mut size = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: an open socket, and a result of the size that is told; geteuid takes nothing.
    unsafe {
        let asked =
            libc::getsockopt(s.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut peer).cast(), &mut size);
        asked == 0 && peer.uid == libc::geteuid()
    }
}

/// Room for `BATCH` descriptors and their header, aligned as the kernel wants it.
#[repr(align(8))]
struct Control([u8; 64 + BATCH * size_of::<RawFd>()]);

/// One byte, and descriptors with it.
fn send(s: &UnixStream, fds: &[RawFd]) -> std::io::Result<()> {
    let mut control = Control([0; 64 + BATCH * size_of::<RawFd>()]);
    let bytes = size_of_val(fds) as u32;
    let mut byte = [1u8];
    let mut part = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    // SAFETY: the message points to live parts; the control buffer has room for a header and the descriptors.
    let sent = unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        (message.msg_iov, message.msg_iovlen) = (&mut part, 1);
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(bytes) as usize;
        let header = libc::CMSG_FIRSTHDR(&message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(bytes) as usize;
        std::ptr::copy_nonoverlapping(fds.as_ptr().cast::<u8>(), libc::CMSG_DATA(header), bytes as usize);
        libc::sendmsg(s.as_raw_fd(), &message, libc::MSG_NOSIGNAL)
    };
    if sent == 1 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

fn receive(s: &UnixStream) -> std::io::Result<Vec<OwnedFd>> {
    let mut control = Control([0; 64 + BATCH * size_of::<RawFd>()]);
    let mut byte = [0u8];
    let mut part = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    let mut out = Vec::new();
    // SAFETY: the message points to live parts; the kernel fills in whole headers, and descriptors that are ours from then on.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        (message.msg_iov, message.msg_iovlen) = (&mut part, 1);
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = control.0.len();
        if libc::recvmsg(s.as_raw_fd(), &mut message, libc::MSG_CMSG_CLOEXEC) <= 0 {
            return Err(std::io::Error::last_os_error());
        }
        let mut header = libc::CMSG_FIRSTHDR(&message);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                let count = ((*header).cmsg_len - libc::CMSG_LEN(0) as usize) / size_of::<RawFd>();
                let fds = libc::CMSG_DATA(header).cast::<RawFd>();
                out.extend((0..count).map(|i| OwnedFd::from_raw_fd(fds.add(i).read_unaligned())));
            }
            header = libc::CMSG_NXTHDR(&message, header);
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Rng, sim};

    #[test]
    fn a_handle_is_whole_or_none() {
        let handle = Handle { pid: 7, token: u64::MAX, key: 3, offset: 512, size: 4096 };
        let bytes = handle.bytes();
        assert_eq!(Handle::parse(&bytes), Some(handle));
        let mut rng = Rng::new(5);
        for _ in 0..2000 {
            let mut broken = bytes;
            broken[rng.below(64) as usize] ^= 1 + rng.below(255) as u8;
            assert_eq!(Handle::parse(&broken), None, "{broken:?}");
        }
        assert!(!is_ours(&[0; 64]));
    }

    #[test]
    fn who_has_no_business_gets_nothing_and_nobody_hangs() {
        let sim = sim();
        sim.context(0);
        let token = serve().unwrap();
        let at = name(std::process::id().into(), token).unwrap();
        let mut rng = Rng::new(9);
        for length in [0usize, 1, 15, 16, 17, 300] {
            let mut s = UnixStream::connect_addr(&at).unwrap();
            limit(&s).unwrap();
            let garbage: Vec<u8> = (0..length).map(|_| rng.below(256) as u8).collect();
            s.write_all(&garbage).unwrap();
            s.shutdown(std::net::Shutdown::Write).unwrap();
            let mut out = Vec::new();
            // A reset counts as closed too: what was sent beyond a request was not read.
            let _ = s.read_to_end(&mut out);
            assert!(out.is_empty(), "{length} bytes of garbage were answered");
        }
        // A handle of nobody: an error at once.
        let gone = Handle { pid: 1 << 40, token, key: 1, offset: 0, size: 512 };
        assert_eq!(open(sim.driver, &gone.bytes()), Err(CuError::INVALID_HANDLE));
        assert_eq!(open(sim.driver, &[3; 64]), Err(CuError::INVALID_HANDLE));
    }

    #[test]
    fn pages_are_mapped_as_they_lie_and_closed_with_the_last_close() {
        let sim = sim();
        let d = sim.driver;
        sim.context(0);
        let before = (sim.live("handles"), sim.live("mappings"));
        let sizes = [2 << 20, 4 << 20];
        let pages: Vec<_> = sizes.iter().map(|&n| (d.page_create(0, n).unwrap(), n)).collect();
        let block = Shareable { pages: pages.clone(), offset: 1 << 20, size: 3 << 20 };
        let bytes = publish(d, block, 77).unwrap();
        assert_eq!(open(d, &bytes), Err(CuError::INVALID_CONTEXT), "in the very process");
        // As another process would: what tells it apart is that it does not know the export.
        let handle = Handle::parse(&bytes).unwrap();
        let fetched = fetch(&handle).unwrap();
        assert_eq!(fetched.iter().map(|p| p.1).collect::<Vec<_>>(), sizes.map(|n| n as u64));
        let mut opened = Opened { handle, base: 0, bytes: 6 << 20, parts: Vec::new(), times: 1 };
        map(d, &fetched, &mut opened).unwrap();
        let p = opened.base + handle.offset;
        OPENED.lock().insert(p, opened);
        assert_eq!(range_of(p + 5), Some((p, 3 << 20)));
        assert_eq!(range_of(p - 1), None);
        let s = sim.stream();
        sim.memset(p, 5, 3 << 20, s);
        OPENED.lock().get_mut(&p).unwrap().times += 1;
        assert_eq!(close(d, p), Some(Ok(())));
        assert!(range_of(p).is_some());
        assert_eq!(close(d, p), Some(Ok(())));
        assert_eq!((range_of(p), close(d, p)), (None, None));
        withdraw(77);
        assert!(fetch(&handle).is_err(), "withdrawn");
        pages.into_iter().for_each(|(h, _)| d.page_release(h).unwrap());
        assert_eq!((sim.live("handles"), sim.live("mappings")), before);
    }
}
