//! The way to the driver, and the current context.

use std::cell::Cell;
use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// What `cudaRuntimeGetVersion` says.
pub const VERSION: c_int = 13000;
/// The version whose functions are asked for: in 13.0 some names took another signature (`cuCtxSynchronize` takes a context).
const ASKED: c_int = 12000;
const INSUFFICIENT_DRIVER: u32 = 35;
const NOT_SUPPORTED: u32 = 801;

type GetProcAddress = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> u32;

/// The address of a driver function, looked up once and kept in `slot`.
pub fn resolve(slot: &AtomicUsize, name: &str) -> Result<usize, u32> {
    let known = slot.load(Ordering::Acquire);
    if known != 0 {
        return Ok(known);
    }
    let found = lookup(name, ASKED, 0)?;
    if found.is_null() {
        return Err(NOT_SUPPORTED);
    }
    slot.store(found as usize, Ordering::Release);
    Ok(found as usize)
}

/// What the driver answers for a name: NULL when it has none of that version.
pub fn lookup(name: &str, version: c_int, flags: u64) -> Result<*mut c_void, u32> {
    static LIB: AtomicUsize = AtomicUsize::new(0);
    static GET: AtomicUsize = AtomicUsize::new(0);
    if GET.load(Ordering::Acquire) == 0 {
        // SAFETY: plain look-ups with NUL-terminated names; two threads at once find the same.
        unsafe {
            let lib = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
            if lib.is_null() {
                return Err(INSUFFICIENT_DRIVER);
            }
            LIB.store(lib as usize, Ordering::Release);
            let get = libc::dlsym(lib, c"cuGetProcAddress_v2".as_ptr());
            if get.is_null() {
                return Err(INSUFFICIENT_DRIVER);
            }
            let init = libc::dlsym(lib, c"cuInit".as_ptr());
            if init.is_null() {
                return Err(INSUFFICIENT_DRIVER);
            }
            let init: unsafe extern "C" fn(u32) -> u32 = std::mem::transmute(init);
            match init(0) {
                0 => {}
                code => return Err(code),
            }
            GET.store(get as usize, Ordering::Release);
        }
    }
    // SAFETY: the driver's own function of that name and signature.
    let get: GetProcAddress = unsafe { std::mem::transmute(GET.load(Ordering::Acquire)) };
    let name = CString::new(name).map_err(|_| 1u32)?;
    let (mut found, mut status) = (std::ptr::null_mut(), 0);
    // SAFETY: a NUL-terminated name and two live results.
    match unsafe { get(name.as_ptr(), &mut found, version, flags, &mut status) } {
        0 | 500 => Ok(found),
        code => Err(code),
    }
}

/// Calls a driver function by its base name: `cu!("cuMemAlloc", ptr => *mut u64, size => usize)`.
macro_rules! cu {
    ($name:literal $(, $arg:expr => $t:ty)* $(,)?) => {{
        static SLOT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
        let f = $crate::driver::resolve(&SLOT, $name)?;
        // SAFETY: the driver's function of that name, called with its own argument types; what the pointers point to is the
        // caller's promise.
        let code = unsafe { std::mem::transmute::<usize, unsafe extern "C" fn($($t),*) -> u32>(f)($($arg),*) };
        if code == 0 { Ok(()) } else { Err(code) }
    }};
}

/// Defines exported runtime functions. The body returns `Result<(), u32>`; an error becomes the last error.
macro_rules! api {
    ($($(#[$meta:meta])* fn $name:ident ($($arg:ident : $t:ty),* $(,)?) $body:block)*) => {
        $(
            $(#[$meta])*
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $t),*) -> u32 {
                let body = std::panic::AssertUnwindSafe(|| -> Result<(), u32> { $body });
                $crate::error::record(std::panic::catch_unwind(body).unwrap_or(Err(999)))
            }
        )*
    };
}

thread_local! {
    static DEVICE: Cell<c_int> = const { Cell::new(0) };
    /// The generation of the device's primary context that this thread made current.
    static SEEN: Cell<u64> = const { Cell::new(0) };
}

/// Of every device: retained primary context (0: none) and how often it was made.
static PRIMARY: Mutex<Vec<(usize, u64)>> = Mutex::new(Vec::new());
static GENERATIONS: AtomicU64 = AtomicU64::new(1);

/// Makes sure that a context is current: the one that is, or the primary one of this thread's device.
pub fn context() -> Result<(), u32> {
    let mut now: usize = 0;
    cu!("cuCtxGetCurrent", &mut now => *mut usize)?;
    let device = DEVICE.get();
    let (primary, generation) = known(device);
    // A foreign context that the program made current itself stays; a primary one of before a reset does not.
    if now != 0 && (primary != now || generation == SEEN.get()) && (primary != 0 || SEEN.get() == 0) {
        return Ok(());
    }
    bind(device)
}

fn known(device: c_int) -> (usize, u64) {
    PRIMARY.lock().unwrap().get(device as usize).copied().unwrap_or((0, 0))
}

/// Makes the primary context of `device` current, and `device` this thread's own.
pub fn bind(device: c_int) -> Result<(), u32> {
    let mut count = 0;
    cu!("cuDeviceGetCount", &mut count => *mut c_int)?;
    if !(0..count).contains(&device) {
        return Err(101);
    }
    let (mut primary, mut generation) = known(device);
    if primary == 0 {
        cu!("cuDevicePrimaryCtxRetain", &mut primary => *mut usize, device => c_int)?;
        let mut all = PRIMARY.lock().unwrap();
        if all.len() < count as usize {
            all.resize(count as usize, (0, 0));
        }
        if all[device as usize].0 == 0 {
            all[device as usize] = (primary, GENERATIONS.fetch_add(1, Ordering::Relaxed));
        }
        generation = all[device as usize].1;
    }
    cu!("cuCtxSetCurrent", primary => usize)?;
    DEVICE.set(device);
    SEEN.set(generation);
    Ok(())
}

/// The device of the current context, or this thread's.
pub fn device() -> c_int {
    let from_ctx = || -> Result<c_int, u32> {
        let (mut now, mut device): (usize, c_int) = (0, 0);
        cu!("cuCtxGetCurrent", &mut now => *mut usize)?;
        if now == 0 {
            return Err(201);
        }
        cu!("cuCtxGetDevice", &mut device => *mut c_int)?;
        Ok(device)
    };
    from_ctx().unwrap_or(DEVICE.get())
}

/// After `cudaDeviceReset`: the primary context is made anew at the next use.
pub fn forget(device: c_int) {
    if let Some(p) = PRIMARY.lock().unwrap().get_mut(device as usize) {
        *p = (0, 0);
    }
}
