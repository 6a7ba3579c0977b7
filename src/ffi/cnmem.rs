//! The cnmem door: CNMeM's own C interface, function for function (`include/cnmem.h`). The managers behind it are in
//! `managers.rs`; here is the reference count, and which device a call means.

// The names are the interface's own.
#![allow(non_snake_case)]

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};

use crate::driver::{Driver, Stream, driver};
use crate::error::Error;
use crate::ffi::gpupool::{cudaStream_t, stream};
use crate::ffi::guard::guard;
use crate::managers::{Device, Request, Rules};
use crate::registry;
use crate::stats::{self, count};

/// The version of CNMeM's interface: 1.0.0.
#[allow(dead_code)] // for the header
pub const CNMEM_VERSION: c_int = 100;

/// What every function returns.
#[allow(non_camel_case_types, clippy::upper_case_acronyms)]
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum cnmemStatus_t {
    CNMEM_STATUS_SUCCESS = 0,
    /// The driver refused something; `GPUPOOL_LOG=warn` says what.
    CNMEM_STATUS_CUDA_ERROR = 1,
    CNMEM_STATUS_INVALID_ARGUMENT = 2,
    /// Before `cnmemInit`, and after the last `cnmemFinalize`.
    CNMEM_STATUS_NOT_INITIALIZED = 3,
    CNMEM_STATUS_OUT_OF_MEMORY = 4,
    CNMEM_STATUS_UNKNOWN_ERROR = 5,
}
use cnmemStatus_t::*;

/// Flags for `cnmemInit`.
#[allow(non_camel_case_types, dead_code)]
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum cnmemManagerFlags_t {
    CNMEM_FLAGS_DEFAULT = 0,
    /// The root keeps the size it was given.
    CNMEM_FLAGS_CANNOT_GROW = 1,
    /// No manager takes memory that is idle in another.
    CNMEM_FLAGS_CANNOT_STEAL = 2,
    /// Managed memory, prefetched to the device.
    CNMEM_FLAGS_MANAGED = 4,
}
use cnmemManagerFlags_t::*;

/// What `cnmemInit` is to do on one device.
#[allow(non_camel_case_types)]
#[repr(C)]
pub struct cnmemDevice_t_ {
    /// The device, as `cudaSetDevice` numbers them.
    pub device: c_int,
    /// Bytes to take, less than the device has; 0 lets the library choose (`GPUPOOL_INIT_PERCENT` of what is free).
    pub size: usize,
    /// How many named streams follow.
    pub numStreams: c_int,
    /// The streams that get a manager of their own; may be NULL when there are none.
    pub streams: *mut cudaStream_t,
    /// Bytes to set aside for each stream; may be NULL.
    pub streamSizes: *mut usize,
}
#[allow(non_camel_case_types)]
pub type cnmemDevice_t = cnmemDevice_t_;

/// What is between the first `cnmemInit` and the last `cnmemFinalize`.
struct Session {
    devices: Vec<Device>,
}

/// The session and the references to it. Held for moments; what a session does happens outside.
static SESSION: RwLock<Option<(Arc<Session>, usize)>> = RwLock::new(None);

/// Held while memory is taken at the first `cnmemInit` and given back at the last `cnmemFinalize`, so that neither runs into
/// the other's half of the device. The outermost lock; no other function waits for it.
static CHANGE: Mutex<()> = Mutex::new(());

fn status(r: Result<(), Error>) -> cnmemStatus_t {
    match r {
        Ok(()) => CNMEM_STATUS_SUCCESS,
        Err(Error::InvalidArgument | Error::UnknownPointer) => CNMEM_STATUS_INVALID_ARGUMENT,
        Err(Error::OutOfMemory { .. }) => CNMEM_STATUS_OUT_OF_MEMORY,
        Err(e @ Error::Driver(_)) => {
            log::warn!("cnmem: {e}");
            CNMEM_STATUS_CUDA_ERROR
        }
    }
}

/// Runs `act` on the session; NOT_INITIALIZED without one.
fn in_session(act: impl FnOnce(&Session) -> Result<(), Error>) -> cnmemStatus_t {
    guard(CNMEM_STATUS_UNKNOWN_ERROR, || {
        let Some(session) = SESSION.read().as_ref().map(|s| s.0.clone()) else {
            return CNMEM_STATUS_NOT_INITIALIZED;
        };
        // No call may reach the driver once the process began to exit.
        status(driver().map_err(Error::from).and_then(|_| act(&session)))
    })
}

impl Session {
    /// The device that a call with stream `s` means: the one that registered it; for the NULL stream the current one.
    fn device(&self, s: Stream) -> Result<&Device, Error> {
        let null = s == Stream::NULL || s == Stream::LEGACY;
        let ordinal = current_ordinal(driver()?);
        let current = self.devices.iter().find(|d| d.ordinal() == ordinal);
        if null {
            return current.ok_or(Error::InvalidArgument);
        }
        if let Some(device) = current.filter(|d| d.serves(s)) {
            return Ok(device);
        }
        self.devices.iter().find(|d| d.serves(s)).ok_or(Error::InvalidArgument)
    }
}

/// The runtime's current device: that of the current context, and 0 for a thread that has none yet.
fn current_ordinal(d: &Driver) -> c_int {
    match d.ctx_current() {
        Ok(Some(_)) => d.ctx_device().unwrap_or(0),
        _ => 0,
    }
}

/// Reads the caller's array. `InvalidArgument` for what makes no sense.
///
/// # Safety
/// `devices` points to `n` structs as the header describes them.
unsafe fn requests(d: &Driver, n: c_int, devices: *const cnmemDevice_t) -> Result<Vec<Request>, Error> {
    let count = d.device_count()?;
    if n <= 0 || devices.is_null() {
        return Err(Error::InvalidArgument);
    }
    let mut out: Vec<Request> = Vec::new();
    // SAFETY: `n` structs, by the caller's promise.
    for device in unsafe { std::slice::from_raw_parts(devices, n as usize) } {
        let wrong_device = !(0..count).contains(&device.device) || out.iter().any(|r| r.ordinal == device.device);
        if wrong_device || device.numStreams < 0 || (device.numStreams > 0 && device.streams.is_null()) {
            return Err(Error::InvalidArgument);
        }
        let mut streams: Vec<(Stream, usize)> = Vec::new();
        for i in 0..device.numStreams as usize {
            // SAFETY: `numStreams` handles, and as many sizes unless NULL, by the caller's promise.
            let (s, size) = unsafe {
                let size = if device.streamSizes.is_null() { 0 } else { *device.streamSizes.add(i) };
                (stream(*device.streams.add(i)), size)
            };
            if s == Stream::NULL || s == Stream::LEGACY || streams.iter().any(|known| known.0 == s) {
                return Err(Error::InvalidArgument);
            }
            streams.push((s, size));
        }
        out.push(Request { ordinal: device.device, size: device.size, streams });
    }
    Ok(out)
}

/// Starts the library: takes the memory of every device named, at once, in 512-byte units. When it was started already, this
/// counts a reference and changes nothing else.
///
/// INVALID_ARGUMENT: no device, one that does not exist or is named twice, a size not under the device's total, or a stream
/// that is NULL, named twice, or not of its device. OUT_OF_MEMORY: a size that cannot be had; nothing is held then. `flags` are
/// `cnmemManagerFlags_t`, combined.
///
/// # Safety
/// `devices` points to `numDevices` structs whose arrays are as long as they say; the streams are live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cnmemInit(numDevices: c_int, devices: *const cnmemDevice_t, flags: c_uint) -> cnmemStatus_t {
    guard(CNMEM_STATUS_UNKNOWN_ERROR, || {
        let _alone = CHANGE.lock();
        if let Some((_, references)) = SESSION.write().as_mut() {
            *references += 1;
            return CNMEM_STATUS_SUCCESS;
        }
        // A program of this door alone makes no pool, whose first would arrange for it.
        registry::report_at_exit();
        let has = |flag: cnmemManagerFlags_t| flags & flag as c_uint != 0;
        let rules = Rules {
            cannot_grow: has(CNMEM_FLAGS_CANNOT_GROW),
            cannot_steal: has(CNMEM_FLAGS_CANNOT_STEAL),
            managed: has(CNMEM_FLAGS_MANAGED),
        };
        let start = || -> Result<Session, Error> {
            let d = driver()?;
            // SAFETY: the caller's promise.
            let requests = unsafe { requests(d, numDevices, devices)? };
            let devices = requests.iter().map(|r| Device::new(d, r, rules)).collect::<Result<_, _>>()?;
            Ok(Session { devices })
        };
        match start() {
            Ok(session) => {
                *SESSION.write() = Some((Arc::new(session), 1));
                CNMEM_STATUS_SUCCESS
            }
            Err(e) => status(Err(e)),
        }
    })
}

/// Gives up one reference; the last one returns all memory to the driver, blocks still live included, after the work of the
/// devices. NOT_INITIALIZED when there is none.
#[unsafe(no_mangle)]
pub extern "C" fn cnmemFinalize() -> cnmemStatus_t {
    guard(CNMEM_STATUS_UNKNOWN_ERROR, || {
        let _alone = CHANGE.lock();
        let last = {
            let mut slot = SESSION.write();
            match slot.as_mut() {
                None => return CNMEM_STATUS_NOT_INITIALIZED,
                Some((_, references)) if *references > 1 => {
                    *references -= 1;
                    None
                }
                Some(_) => slot.take(),
            }
        };
        // Outside the session's lock: this waits for the devices. A call still running in another thread drops it later.
        drop(last);
        CNMEM_STATUS_SUCCESS
    })
}

/// Counts one more reference.
#[unsafe(no_mangle)]
pub extern "C" fn cnmemRetain() -> cnmemStatus_t {
    guard(CNMEM_STATUS_UNKNOWN_ERROR, || match SESSION.write().as_mut() {
        None => CNMEM_STATUS_NOT_INITIALIZED,
        Some((_, references)) => {
            *references += 1;
            CNMEM_STATUS_SUCCESS
        }
    })
}

/// The same as `cnmemFinalize`.
#[unsafe(no_mangle)]
pub extern "C" fn cnmemRelease() -> cnmemStatus_t {
    cnmemFinalize()
}

/// Makes a manager for `stream` on its device. INVALID_ARGUMENT for the NULL stream, and for a device that `cnmemInit` did not
/// name. A stream that has one already keeps it.
///
/// # Safety
/// `stream` is a live stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cnmemRegisterStream(stream: cudaStream_t) -> cnmemStatus_t {
    let s = self::stream(stream);
    in_session(|session| {
        if s == Stream::NULL || s == Stream::LEGACY {
            return Err(Error::InvalidArgument);
        }
        session.devices.iter().find(|d| d.owns(s)).ok_or(Error::InvalidArgument)?.register(s)
    })
}

/// Allocates `size` bytes for work on `stream`, 512-byte aligned. Size 0 succeeds and stores NULL.
///
/// INVALID_ARGUMENT: `ptr` NULL with a size, or a stream without a manager. OUT_OF_MEMORY: see the flags of `cnmemInit`.
///
/// # Safety
/// `ptr` is NULL or writable; `stream` is NULL or a live stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cnmemMalloc(ptr: *mut *mut c_void, size: usize, stream: cudaStream_t) -> cnmemStatus_t {
    let s = self::stream(stream);
    in_session(|session| {
        if ptr.is_null() {
            return if size == 0 { Ok(()) } else { Err(Error::InvalidArgument) };
        }
        // SAFETY: not NULL, and writable by the caller's promise.
        let ptr = unsafe { &mut *ptr };
        if size == 0 {
            *ptr = std::ptr::null_mut();
            return Ok(());
        }
        *ptr = session.device(s)?.malloc(size, s)? as *mut c_void;
        count(&stats::CNMEM.mallocs);
        Ok(())
    })
}

/// Frees a block. Work that its stream gets later may reuse the memory at once. On the NULL stream the block of a named stream
/// may be freed too: it is reused only after all work submitted so far. NULL succeeds.
///
/// INVALID_ARGUMENT, and nothing is changed: a pointer that is not the start of a live block, a stream without a manager, or
/// another named stream than the block's.
///
/// # Safety
/// `stream` is NULL or a live stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cnmemFree(ptr: *mut c_void, stream: cudaStream_t) -> cnmemStatus_t {
    let s = self::stream(stream);
    in_session(|session| {
        if ptr.is_null() {
            return Ok(());
        }
        let device = session.devices.iter().find(|d| d.holds(ptr as u64)).ok_or(Error::InvalidArgument)?;
        device.free(ptr as u64, s)?;
        count(&stats::CNMEM.frees);
        Ok(())
    })
}

/// Free and total bytes of the manager of `stream`; for NULL of the current device's root, whose total includes what its
/// children have. INVALID_ARGUMENT: a NULL pointer, or a stream without a manager.
///
/// # Safety
/// Both pointers are NULL or writable; `stream` is NULL or a live stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cnmemMemGetInfo(
    freeMem: *mut usize,
    totalMem: *mut usize,
    stream: cudaStream_t,
) -> cnmemStatus_t {
    let s = self::stream(stream);
    in_session(|session| {
        if freeMem.is_null() || totalMem.is_null() {
            return Err(Error::InvalidArgument);
        }
        let (free, total) = session.device(s)?.info(s)?;
        // SAFETY: neither is NULL, and both are writable by the caller's promise.
        unsafe {
            freeMem.write(free);
            totalMem.write(total);
        }
        Ok(())
    })
}

/// Writes the manager of `stream`, block by block, to `file`.
///
/// # Safety
/// `file` is an open stream of the C library; `stream` is NULL or a live stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cnmemPrintMemoryState(file: *mut libc::FILE, stream: cudaStream_t) -> cnmemStatus_t {
    let s = self::stream(stream);
    in_session(|session| {
        if file.is_null() {
            return Err(Error::InvalidArgument);
        }
        let text = std::ffi::CString::new(session.device(s)?.describe(s)?).map_err(|_| Error::InvalidArgument)?;
        // SAFETY: an open stream by the caller's promise, and a NUL-terminated text. No lock is held.
        unsafe { libc::fputs(text.as_ptr(), file) };
        Ok(())
    })
}

/// A `cnmemStatus_t` that C passes in: any number may come, which a Rust enum must not hold. The header calls it
/// `cnmemStatus_t` (cbindgen.cnmem.toml).
#[allow(non_camel_case_types)]
pub type cnmemStatusIn_t = c_uint;

/// The name of a status; never NULL.
#[unsafe(no_mangle)]
pub extern "C" fn cnmemGetErrorString(status: cnmemStatusIn_t) -> *const c_char {
    let text = match status {
        0 => c"CNMEM_STATUS_SUCCESS",
        1 => c"CNMEM_STATUS_CUDA_ERROR",
        2 => c"CNMEM_STATUS_INVALID_ARGUMENT",
        3 => c"CNMEM_STATUS_NOT_INITIALIZED",
        4 => c"CNMEM_STATUS_OUT_OF_MEMORY",
        _ => c"CNMEM_STATUS_UNKNOWN_ERROR",
    };
    text.as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn two_threads_may_start_at_once() {
        let sim = testing::sim();
        sim.context(0);
        let before = sim.driver.mem_info().unwrap().0;
        for _ in 0..30 {
            let barrier = std::sync::Barrier::new(2);
            let start = || {
                sim.context(0);
                let (streams, streamSizes) = (std::ptr::null_mut(), std::ptr::null_mut());
                let device = cnmemDevice_t_ { device: 0, size: before / 10 * 8, numStreams: 0, streams, streamSizes };
                barrier.wait();
                // SAFETY: one live struct without streams.
                let answer = unsafe { cnmemInit(1, &device, 0) };
                (answer, cnmemFinalize())
            };
            std::thread::scope(|scope| {
                for thread in [scope.spawn(start), scope.spawn(start)] {
                    let both = (CNMEM_STATUS_SUCCESS, CNMEM_STATUS_SUCCESS);
                    assert_eq!(thread.join().unwrap(), both, "80 % of the device is there for both to share");
                }
            });
            assert_eq!(cnmemRetain(), CNMEM_STATUS_NOT_INITIALIZED);
            assert_eq!(sim.driver.mem_info().unwrap().0, before);
        }
    }
}
