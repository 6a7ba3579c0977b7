//! The CUDA driver: the functions gpupool uses, with Rust types and no policy. The only file that names cudarc, of which it
//! takes types and constants alone; the functions are looked up here, so that a driver that lacks one of the newer ones, or a
//! machine without any driver, is an answer and not a panic.
//!
//! Nothing here links to CUDA. `driver()` opens `libcuda.so.1` at first use.

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use cudarc::driver::sys;
use once_cell::sync::OnceCell;

/// A device address (`CUdeviceptr`).
pub type DevicePtr = u64;

/// A stream handle, as programs pass it. Handles come back after a stream's death: `Driver::stream_id` tells streams apart.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Stream(pub usize);

impl Stream {
    /// The default stream of code that was not compiled for per-thread default streams: the legacy stream.
    pub const NULL: Stream = Stream(0);
    pub const LEGACY: Stream = Stream(1);
    /// The calling thread's own default stream.
    pub const PER_THREAD: Stream = Stream(2);
}

/// A `CUresult` other than success.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CuError(pub u32);

impl CuError {
    pub const INVALID_VALUE: CuError = CuError(sys::CUresult::CUDA_ERROR_INVALID_VALUE as u32);
    pub const OUT_OF_MEMORY: CuError = CuError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32);
    pub const NOT_INITIALIZED: CuError = CuError(sys::CUresult::CUDA_ERROR_NOT_INITIALIZED as u32);
    pub const DEINITIALIZED: CuError = CuError(sys::CUresult::CUDA_ERROR_DEINITIALIZED as u32);
    pub const NO_DEVICE: CuError = CuError(sys::CUresult::CUDA_ERROR_NO_DEVICE as u32);
    pub const INVALID_CONTEXT: CuError = CuError(sys::CUresult::CUDA_ERROR_INVALID_CONTEXT as u32);
    pub const INVALID_HANDLE: CuError = CuError(sys::CUresult::CUDA_ERROR_INVALID_HANDLE as u32);
    pub const NOT_READY: CuError = CuError(sys::CUresult::CUDA_ERROR_NOT_READY as u32);
    pub const CAPTURE_UNSUPPORTED: CuError = CuError(sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED as u32);
    pub const NOT_SUPPORTED: CuError = CuError(sys::CUresult::CUDA_ERROR_NOT_SUPPORTED as u32);
    /// `cudaErrorInsufficientDriver`, which the runtime answers where no driver can be loaded; `CUresult` has no such number.
    pub const NO_DRIVER: CuError = CuError(35);
}

pub type CuResult<T> = Result<T, CuError>;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Context(pub usize);
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Event(pub usize);
/// Physical memory made by `cuMemCreate`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageHandle(pub u64);

pub use sys::CUdevice_attribute as DeviceAttribute;

/// Declares the table of functions: required ones make `driver()` fail when they are missing, optional ones are `None`.
macro_rules! functions {
    (required { $($r:ident = $rname:literal ($($rarg:ty),*);)* } optional { $($o:ident = $oname:literal ($($oarg:ty),*);)* }) => {
        struct Functions {
            $($r: unsafe extern "C" fn($($rarg),*) -> c_uint,)*
            $($o: Option<unsafe extern "C" fn($($oarg),*) -> c_uint>,)*
        }

        impl Functions {
            fn resolve(lib: *mut c_void) -> Result<Functions, &'static str> {
                $(let $r = symbol(lib, $rname).ok_or($rname)?;)*
                $(let $o = symbol(lib, $oname);)*
                // SAFETY: each symbol is the driver's function of that name, whose documented signature stands in the table.
                unsafe {
                    Ok(Functions {
                        $($r: std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($rarg),*) -> c_uint>($r),)*
                        $($o: std::mem::transmute::<Option<std::ptr::NonNull<c_void>>, Option<unsafe extern "C" fn($($oarg),*) -> c_uint>>(
                            $o.and_then(std::ptr::NonNull::new)
                        ),)*
                    })
                }
            }
        }
    };
}

type Ctx = *mut c_void;
type RawStream = *mut c_void;
type RawEvent = *mut c_void;
type Props = sys::CUmemAllocationProp;
type Access = sys::CUmemAccessDesc;
type Location = sys::CUmemLocation;

functions! {
    required {
        init = "cuInit" (c_uint);
        driver_version = "cuDriverGetVersion" (*mut c_int);
        device_count = "cuDeviceGetCount" (*mut c_int);
        device_total = "cuDeviceTotalMem_v2" (*mut usize, c_int);
        device_attribute = "cuDeviceGetAttribute" (*mut c_int, c_uint, c_int);
        can_access_peer = "cuDeviceCanAccessPeer" (*mut c_int, c_int, c_int);
        ctx_get_current = "cuCtxGetCurrent" (*mut Ctx);
        ctx_set_current = "cuCtxSetCurrent" (Ctx);
        ctx_get_device = "cuCtxGetDevice" (*mut c_int);
        ctx_synchronize = "cuCtxSynchronize" ();
        primary_retain = "cuDevicePrimaryCtxRetain" (*mut Ctx, c_int);
        primary_release = "cuDevicePrimaryCtxRelease_v2" (c_int);
        primary_state = "cuDevicePrimaryCtxGetState" (c_int, *mut c_uint, *mut c_int);
        mem_info = "cuMemGetInfo_v2" (*mut usize, *mut usize);
        mem_alloc = "cuMemAlloc_v2" (*mut u64, usize);
        mem_free = "cuMemFree_v2" (u64);
        mem_free_host = "cuMemFreeHost" (*mut c_void);
        mem_alloc_managed = "cuMemAllocManaged" (*mut u64, usize, c_uint);
        memcpy_async = "cuMemcpyAsync" (u64, u64, usize, RawStream);
        stream_is_capturing = "cuStreamIsCapturing" (RawStream, *mut c_uint);
        exchange_capture_mode = "cuThreadExchangeStreamCaptureMode" (*mut c_uint);
        stream_get_ctx = "cuStreamGetCtx" (RawStream, *mut Ctx);
        event_create = "cuEventCreate" (*mut RawEvent, c_uint);
        event_destroy = "cuEventDestroy_v2" (RawEvent);
        event_query = "cuEventQuery" (RawEvent);
        event_synchronize = "cuEventSynchronize" (RawEvent);
    }
    optional {
        ctx_get_id = "cuCtxGetId" (Ctx, *mut u64);
        ctx_record_event = "cuCtxRecordEvent" (Ctx, RawEvent);
        ctx_wait_event = "cuCtxWaitEvent" (Ctx, RawEvent);
        stream_get_id = "cuStreamGetId" (RawStream, *mut u64);
        capture_info = "cuStreamGetCaptureInfo_v2" (RawStream, *mut c_uint, *mut u64, *mut c_void, *mut c_void, *mut c_void);
        prefetch_v2 = "cuMemPrefetchAsync_v2" (u64, usize, Location, c_uint, RawStream);
        prefetch = "cuMemPrefetchAsync" (u64, usize, c_int, RawStream);
        granularity = "cuMemGetAllocationGranularity" (*mut usize, *const Props, c_uint);
        address_reserve = "cuMemAddressReserve" (*mut u64, usize, usize, u64, u64);
        mem_create = "cuMemCreate" (*mut u64, usize, *const Props, u64);
        mem_release = "cuMemRelease" (u64);
        mem_map = "cuMemMap" (u64, usize, usize, u64, u64);
        mem_unmap = "cuMemUnmap" (u64, usize);
        mem_export = "cuMemExportToShareableHandle" (*mut c_int, u64, c_uint, u64);
        mem_import = "cuMemImportFromShareableHandle" (*mut u64, *mut c_void, c_uint);
        address_free = "cuMemAddressFree" (u64, usize);
        mem_set_access = "cuMemSetAccess" (u64, usize, *const Access, usize);
    }
}

fn symbol(lib: *mut c_void, name: &str) -> Option<*mut c_void> {
    let name = std::ffi::CString::new(name).ok()?;
    crate::linker::dlsym(lib, &name).map(|p| p as *mut c_void)
}

pub struct Driver {
    f: Functions,
    version: i32,
}

static DRIVER: OnceCell<Driver> = OnceCell::new();
/// cuInit succeeded here.
static READY: AtomicBool = AtomicBool::new(false);
static EXITING: AtomicBool = AtomicBool::new(false);
static FORKED: AtomicBool = AtomicBool::new(false);

/// The driver, loaded and initialised at the first call. A failure is not remembered: a driver may come later. Errors:
/// `NO_DRIVER` without a usable libcuda; what `cuInit` said (100 without a device); `DEINITIALIZED` once the process began to
/// exit, when no call may be made any more; `NOT_INITIALIZED` in a forked child, which has no device state.
#[inline]
pub fn driver() -> CuResult<&'static Driver> {
    if READY.load(Ordering::Acquire)
        && let Some(d) = usable()
    {
        return Ok(d);
    }
    driver_slow()
}

/// The driver if it is loaded, initialised or not: who stands in for its functions must not initialise it for a program that did not.
/// None once the process began to exit and in a forked child.
#[inline]
pub fn present() -> Option<&'static Driver> {
    usable().or_else(|| {
        crate::linker::loaded(NAME)?;
        if is_exiting() || is_forked() { None } else { DRIVER.get_or_try_init(load).ok() }
    })
}

#[inline]
fn usable() -> Option<&'static Driver> {
    DRIVER.get().filter(|_| !EXITING.load(Ordering::Relaxed) && !FORKED.load(Ordering::Relaxed))
}

/// Whether the process began to exit.
pub fn is_exiting() -> bool {
    EXITING.load(Ordering::Relaxed)
}

/// Whether this is a child of the process that loaded the driver.
pub fn is_forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

const NAME: &CStr = c"libcuda.so.1";

#[cold]
#[inline(never)]
fn driver_slow() -> CuResult<&'static Driver> {
    if is_exiting() {
        return Err(CuError::DEINITIALIZED);
    }
    if is_forked() {
        return Err(CuError::NOT_INITIALIZED);
    }
    let d = DRIVER.get_or_try_init(load)?;
    // Not under a lock: a driver's cuInit may start threads that come here.
    // SAFETY: cuInit takes flags, which must be 0.
    check(unsafe { (d.f.init)(0) })?;
    READY.store(true, Ordering::Release);
    Ok(d)
}

fn load() -> CuResult<Driver> {
    // The logger comes with the settings, and what goes wrong here is what a user asks the log for.
    crate::config::get();
    // SAFETY: a plain dlopen of a NUL-terminated name.
    let lib = unsafe { libc::dlopen(NAME.as_ptr(), libc::RTLD_NOW) };
    if lib.is_null() {
        // Every call tries again; one line is enough.
        static TOLD: AtomicBool = AtomicBool::new(false);
        if !TOLD.swap(true, Ordering::Relaxed) {
            log::info!("libcuda.so.1 cannot be loaded");
        }
        return Err(CuError::NO_DRIVER);
    }
    let f = Functions::resolve(lib).map_err(|name| {
        log::warn!("the driver lacks {name}");
        CuError::NO_DRIVER
    })?;
    let mut version = 0;
    // SAFETY: the pointer is to a live int. This one function may be called before cuInit.
    check(unsafe { (f.driver_version)(&mut version) })?;
    extern "C" fn at_exit() {
        EXITING.store(true, Ordering::SeqCst);
        CHANGES.fetch_add(1, Ordering::Relaxed);
        for act in AT_EXIT.lock().iter() {
            act();
        }
    }
    extern "C" fn in_child() {
        FORKED.store(true, Ordering::SeqCst);
        CHANGES.fetch_add(1, Ordering::Relaxed);
    }
    // SAFETY: the handlers only store to atomics and run what was registered here; the library is never unloaded (-z nodelete).
    unsafe {
        libc::atexit(at_exit);
        libc::pthread_atfork(None, None, Some(in_child));
    }
    log::debug!("driver version {version}");
    Ok(Driver { f, version })
}

/// What runs once the process began to exit, when the driver is not called any more.
static AT_EXIT: parking_lot::Mutex<Vec<fn()>> = parking_lot::Mutex::new(Vec::new());

pub fn at_exit(act: fn()) {
    AT_EXIT.lock().push(act);
}

/// Counted up whenever something may have changed what threads remember of streams and contexts: a stream or a context died, a
/// capture began, the process forked or exits.
pub static CHANGES: AtomicU64 = AtomicU64::new(1);

fn check(code: c_uint) -> CuResult<()> {
    if code == 0 { Ok(()) } else { Err(CuError(code)) }
}

/// Calls a function of the table that fills in one value.
macro_rules! out {
    ($t:ty, |$v:ident| $call:expr) => {{
        let mut $v: $t = Default::default();
        // SAFETY: the pointer is to a live value of the type the function writes; the other arguments are plain values, which
        // the driver checks.
        check(unsafe { $call })?;
        Ok($v)
    }};
}

/// Calls a function of the table whose arguments are plain values.
macro_rules! call {
    ($call:expr) => {
        // SAFETY: every argument is a plain value, or a pointer to a live one; the driver checks what it means.
        check(unsafe { $call })
    };
}

impl Driver {
    /// Whether one event can cover, or hold back, every stream of a context (CUDA 12.5).
    pub fn has_ctx_fences(&self) -> bool {
        self.version >= 12050 && self.f.ctx_record_event.is_some() && self.f.ctx_wait_event.is_some()
    }
    /// Whether streams have ids (CUDA 12.0).
    pub fn has_stream_id(&self) -> bool {
        self.f.stream_get_id.is_some()
    }

    // ---- devices ----

    pub fn device_count(&self) -> CuResult<i32> {
        out!(c_int, |n| (self.f.device_count)(&mut n))
    }
    /// Bytes.
    pub fn device_total(&self, ordinal: i32) -> CuResult<usize> {
        out!(usize, |n| (self.f.device_total)(&mut n, ordinal))
    }
    pub fn attribute(&self, attribute: DeviceAttribute, ordinal: i32) -> CuResult<i32> {
        out!(c_int, |v| (self.f.device_attribute)(&mut v, attribute as c_uint, ordinal))
    }
    fn has(&self, attribute: DeviceAttribute, ordinal: i32) -> bool {
        self.attribute(attribute, ordinal).is_ok_and(|v| v != 0)
    }
    /// Whether kernels of `peer` can reach memory of `ordinal`.
    pub fn can_access_peer(&self, peer: i32, ordinal: i32) -> CuResult<bool> {
        let mut can = 0;
        call!((self.f.can_access_peer)(&mut can, peer, ordinal))?;
        Ok(can != 0)
    }
    pub fn vmm_supported(&self, ordinal: i32) -> bool {
        let f = &self.f;
        f.mem_create.is_some()
            && f.mem_map.is_some()
            && f.mem_set_access.is_some()
            && self.has(DeviceAttribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, ordinal)
    }

    // ---- contexts ----

    pub fn ctx_current(&self) -> CuResult<Option<Context>> {
        let mut ctx: Ctx = std::ptr::null_mut();
        call!((self.f.ctx_get_current)(&mut ctx))?;
        Ok((!ctx.is_null()).then_some(Context(ctx as usize)))
    }
    pub fn ctx_set_current(&self, ctx: Option<Context>) -> CuResult<()> {
        call!((self.f.ctx_set_current)(ctx.map_or(0, |c| c.0) as Ctx))
    }
    /// The device of the current context.
    pub fn ctx_device(&self) -> CuResult<i32> {
        out!(c_int, |d| (self.f.ctx_get_device)(&mut d))
    }
    /// Unique for the life of the process; before CUDA 12 the handle has to do.
    pub fn ctx_id(&self, ctx: Context) -> CuResult<u64> {
        let Some(get_id) = self.f.ctx_get_id else {
            return Ok(ctx.0 as u64);
        };
        out!(u64, |id| get_id(ctx.0 as Ctx, &mut id))
    }
    /// Waits for all work of the current context.
    pub fn ctx_synchronize(&self) -> CuResult<()> {
        call!((self.f.ctx_synchronize)())
    }
    pub fn primary_retain(&self, ordinal: i32) -> CuResult<Context> {
        let mut ctx: Ctx = std::ptr::null_mut();
        call!((self.f.primary_retain)(&mut ctx, ordinal))?;
        Ok(Context(ctx as usize))
    }
    pub fn primary_release(&self, ordinal: i32) -> CuResult<()> {
        call!((self.f.primary_release)(ordinal))
    }

    pub fn primary_is_active(&self, ordinal: i32) -> CuResult<bool> {
        let (mut flags, mut active) = (0, 0);
        call!((self.f.primary_state)(ordinal, &mut flags, &mut active))?;
        Ok(active != 0)
    }

    // ---- memory ----

    /// Bytes free and in all, on the device of the current context.
    pub fn mem_info(&self) -> CuResult<(usize, usize)> {
        let (mut free, mut total) = (0, 0);
        call!((self.f.mem_info)(&mut free, &mut total))?;
        Ok((free, total))
    }
    pub fn mem_alloc(&self, size: usize) -> CuResult<DevicePtr> {
        out!(u64, |p| (self.f.mem_alloc)(&mut p, size))
    }
    /// Waits for the device.
    pub fn mem_free(&self, p: DevicePtr) -> CuResult<()> {
        call!((self.f.mem_free)(p))
    }
    /// Pinned host memory. Waits for the device.
    pub fn mem_free_host(&self, address: usize) -> CuResult<()> {
        call!((self.f.mem_free_host)(address as *mut c_void))
    }
    pub fn mem_alloc_managed(&self, size: usize) -> CuResult<DevicePtr> {
        out!(u64, |p| (self.f.mem_alloc_managed)(&mut p, size, sys::CUmemAttach_flags::CU_MEM_ATTACH_GLOBAL as c_uint))
    }
    /// Moves managed memory to the device.
    pub fn mem_prefetch(&self, p: DevicePtr, size: usize, ordinal: i32, s: Stream) -> CuResult<()> {
        if let Some(prefetch) = self.f.prefetch_v2 {
            return call!(prefetch(p, size, location(ordinal), 0, s.0 as RawStream));
        }
        let prefetch = self.f.prefetch.ok_or(CuError::NOT_SUPPORTED)?;
        call!(prefetch(p, size, ordinal, s.0 as RawStream))
    }
    /// Copies in stream order, between any two of device and host.
    pub fn memcpy_async(&self, to: DevicePtr, from: DevicePtr, size: usize, s: Stream) -> CuResult<()> {
        call!((self.f.memcpy_async)(to, from, size, s.0 as RawStream))
    }

    // ---- streams and events ----

    /// Unique for the life of the process. 900 on a stream that is being captured, which it breaks: ask `capture_id` first.
    pub fn stream_id(&self, s: Stream) -> CuResult<u64> {
        let get_id = self.f.stream_get_id.ok_or(CuError::NOT_SUPPORTED)?;
        out!(u64, |id| get_id(s.0 as RawStream, &mut id))
    }
    pub fn stream_ctx(&self, s: Stream) -> CuResult<Context> {
        let mut ctx: Ctx = std::ptr::null_mut();
        call!((self.f.stream_get_ctx)(s.0 as RawStream, &mut ctx))?;
        Ok(Context(ctx as usize))
    }
    /// 906 for the legacy stream while a blocking stream is being captured.
    pub fn stream_is_capturing(&self, s: Stream) -> CuResult<bool> {
        let status = out!(c_uint, |v| (self.f.stream_is_capturing)(s.0 as RawStream, &mut v));
        status.map(|v| v != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as c_uint)
    }
    /// The id of the capture that the stream is in; None when it is in none.
    pub fn capture_id(&self, s: Stream) -> CuResult<Option<u64>> {
        if !self.stream_is_capturing(s)? {
            return Ok(None);
        }
        let Some(info) = self.f.capture_info else {
            return Ok(Some(s.0 as u64));
        };
        let (mut status, mut id) = (0, 0);
        let none = std::ptr::null_mut();
        call!(info(s.0 as RawStream, &mut status, &mut id, none, none, none))?;
        Ok(Some(id))
    }
    /// An event of the current context, without timing.
    pub fn event_create(&self) -> CuResult<Event> {
        let mut e: RawEvent = std::ptr::null_mut();
        call!((self.f.event_create)(&mut e, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint))?;
        Ok(Event(e as usize))
    }
    pub fn event_destroy(&self, e: Event) -> CuResult<()> {
        call!((self.f.event_destroy)(e.0 as RawEvent))
    }
    /// Whether what was recorded is done.
    pub fn event_query(&self, e: Event) -> CuResult<bool> {
        match call!((self.f.event_query)(e.0 as RawEvent)) {
            Ok(()) => Ok(true),
            Err(CuError::NOT_READY) => Ok(false),
            Err(e) => Err(e),
        }
    }
    pub fn event_synchronize(&self, e: Event) -> CuResult<()> {
        call!((self.f.event_synchronize)(e.0 as RawEvent))
    }
    /// The event covers everything submitted to the context so far, on every stream. 900 during a capture, which it breaks.
    pub fn ctx_record_event(&self, ctx: Context, e: Event) -> CuResult<()> {
        let record = self.f.ctx_record_event.ok_or(CuError::NOT_SUPPORTED)?;
        call!(record(ctx.0 as Ctx, e.0 as RawEvent))
    }
    /// All work given to the context from now on, on every stream, waits on the device for what the event covers. 900 during a
    /// capture, which it breaks.
    pub fn ctx_wait_event(&self, ctx: Context, e: Event) -> CuResult<()> {
        let wait = self.f.ctx_wait_event.ok_or(CuError::NOT_SUPPORTED)?;
        call!(wait(ctx.0 as Ctx, e.0 as RawEvent))
    }

    // ---- pages ----

    /// Bytes that page sizes must be a multiple of.
    pub fn vmm_granularity(&self, ordinal: i32) -> CuResult<usize> {
        let granularity = self.f.granularity.ok_or(CuError::NOT_SUPPORTED)?;
        let props = self.page_props(ordinal, true);
        out!(usize, |n| granularity(
            &mut n,
            &props,
            sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED as c_uint
        ))
    }
    pub fn va_reserve(&self, size: usize) -> CuResult<DevicePtr> {
        let reserve = self.f.address_reserve.ok_or(CuError::NOT_SUPPORTED)?;
        out!(u64, |p| reserve(&mut p, size, 0, 0, 0))
    }
    /// Physical memory of `size` bytes, shareable by file descriptor and open to GPUDirect RDMA where the device offers them.
    pub fn page_create(&self, ordinal: i32, size: usize) -> CuResult<PageHandle> {
        let create = self.f.mem_create.ok_or(CuError::NOT_SUPPORTED)?;
        let make = |shared| {
            let props = self.page_props(ordinal, shared);
            out!(u64, |h| create(&mut h, size, &props, 0))
        };
        match make(true) {
            // A container may forbid what the device could do.
            Err(CuError::INVALID_VALUE | CuError::NOT_SUPPORTED) => make(false),
            other => other,
        }
        .map(PageHandle)
    }
    pub fn page_release(&self, h: PageHandle) -> CuResult<()> {
        let release = self.f.mem_release.ok_or(CuError::NOT_SUPPORTED)?;
        call!(release(h.0))
    }
    pub fn page_map(&self, va: DevicePtr, size: usize, h: PageHandle) -> CuResult<()> {
        let map = self.f.mem_map.ok_or(CuError::NOT_SUPPORTED)?;
        call!(map(va, size, 0, h.0, 0))
    }
    /// Does not wait: work that uses the range must be complete.
    pub fn page_unmap(&self, va: DevicePtr, size: usize) -> CuResult<()> {
        let unmap = self.f.mem_unmap.ok_or(CuError::NOT_SUPPORTED)?;
        call!(unmap(va, size))
    }
    /// A file descriptor for the page's memory, the caller's to close.
    pub fn page_export(&self, h: PageHandle) -> CuResult<c_int> {
        let export = self.f.mem_export.ok_or(CuError::NOT_SUPPORTED)?;
        let kind = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0 as c_uint;
        out!(c_int, |fd| export(&mut fd, h.0, kind, 0))
    }
    /// The page that another process exported as `fd`, which stays the caller's.
    pub fn page_import(&self, fd: c_int) -> CuResult<PageHandle> {
        let import = self.f.mem_import.ok_or(CuError::NOT_SUPPORTED)?;
        let kind = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0 as c_uint;
        // The driver takes the number itself for a pointer.
        out!(u64, |h| import(&mut h, fd as usize as *mut c_void, kind)).map(PageHandle)
    }
    pub fn va_free(&self, va: DevicePtr, size: usize) -> CuResult<()> {
        let free = self.f.address_free.ok_or(CuError::NOT_SUPPORTED)?;
        call!(free(va, size))
    }
    /// Opens a mapped range to the kernels of `ordinals`.
    pub fn page_access(&self, va: DevicePtr, size: usize, ordinals: &[i32]) -> CuResult<()> {
        let set_access = self.f.mem_set_access.ok_or(CuError::NOT_SUPPORTED)?;
        let access: Vec<Access> = ordinals
            .iter()
            .map(|&o| Access {
                location: location(o),
                flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            })
            .collect();
        call!(set_access(va, size, access.as_ptr(), access.len()))
    }

    fn page_props(&self, ordinal: i32, shared: bool) -> Props {
        // SAFETY: the C struct is plain data for which zero is a value: no handle type, no flags.
        let mut props: Props = unsafe { std::mem::zeroed() };
        props.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        props.location = location(ordinal);
        if shared && self.has(DeviceAttribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, ordinal)
        {
            props.requestedHandleTypes = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        }
        let rdma = DeviceAttribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED;
        if shared && self.has(rdma, ordinal) {
            props.allocFlags.gpuDirectRDMACapable = 1;
        }
        props
    }
}

fn location(ordinal: i32) -> Location {
    Location { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: ordinal }
}

/// Lets this thread call what a capture elsewhere forbids (allocations, event queries) for a scope: none of it is part of
/// anybody's capture. What is forbidden in every mode stays so.
pub struct RelaxedCapture {
    driver: &'static Driver,
    before: Option<c_uint>,
}

impl RelaxedCapture {
    pub fn enter(driver: &'static Driver) -> RelaxedCapture {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_uint;
        let exchanged = call!((driver.f.exchange_capture_mode)(&mut mode));
        RelaxedCapture { driver, before: exchanged.is_ok().then_some(mode) }
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        if let Some(mut mode) = self.before
            && let Err(e) = call!((self.driver.f.exchange_capture_mode)(&mut mode))
        {
            log::warn!("the thread's capture mode could not be restored: {e:?}");
        }
    }
}

/// Makes a context current on this thread for a scope, and what was current before again afterwards.
pub struct CurrentContext {
    before: Option<Option<Context>>,
}

impl CurrentContext {
    pub fn enter(d: &Driver, ctx: Context) -> CuResult<CurrentContext> {
        let current = d.ctx_current()?;
        if current == Some(ctx) {
            return Ok(CurrentContext { before: None });
        }
        d.ctx_set_current(Some(ctx))?;
        Ok(CurrentContext { before: Some(current) })
    }
}

impl Drop for CurrentContext {
    fn drop(&mut self) {
        if let (Some(before), Ok(d)) = (self.before, driver())
            && let Err(e) = d.ctx_set_current(before)
        {
            log::warn!("the context that was current could not be restored: {e:?}");
        }
    }
}
