//! What some drivers were seen to do, on demand: to lack a symbol, to look their own symbols up, to start a thread in `cuInit`.

use std::ffi::{CStr, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::codes::{Answer, UNKNOWN};
use crate::config;

/// Whether `SIMCUDA_LACKS` names this exported function.
pub fn lacks(symbol: &str) -> bool {
    static NAMES: OnceLock<String> = OnceLock::new();
    let names = NAMES.get_or_init(|| std::env::var("SIMCUDA_LACKS").unwrap_or_default());
    names.split(',').any(|name| name.trim() == symbol)
}

/// What `cuInit` does besides, the first time.
pub fn at_init() -> Answer {
    static DONE: AtomicBool = AtomicBool::new(false);
    if DONE.swap(true, Ordering::AcqRel) {
        return Ok(());
    }
    if config::number("SIMCUDA_SELF_LOOKUP", 0) != 0 {
        look_up_own()?;
    }
    if config::number("SIMCUDA_INIT_THREAD", 0) != 0 {
        init_in_a_thread()?;
    }
    Ok(())
}

/// A handle on this library itself.
fn own_handle() -> *mut c_void {
    // SAFETY: an address of this library, a result to fill, and the path that the loader knows it by.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        if libc::dladdr(own_handle as *const () as *const c_void, &mut info) == 0 {
            return std::ptr::null_mut();
        }
        libc::dlopen(info.dli_fname, libc::RTLD_NOW | libc::RTLD_NOLOAD)
    }
}

fn own(symbol: &CStr) -> usize {
    // SAFETY: a handle and a NUL-terminated name.
    unsafe { libc::dlsym(own_handle(), symbol.as_ptr()) as usize }
}

/// The driver's own look-ups must give its own functions, whoever is preloaded.
fn look_up_own() -> Answer {
    let wanted = [
        (c"cuMemAlloc_v2", crate::memory::cuMemAlloc_v2 as *const () as usize),
        (c"cuMemFree_v2", crate::memory::cuMemFree_v2 as *const () as usize),
        (c"cuGetProcAddress_v2", crate::proc_address::cuGetProcAddress_v2 as *const () as usize),
    ];
    for (name, address) in wanted {
        if own(name) != address {
            eprintln!("simcuda: the driver's look-up of its own {name:?} gave another function");
            return Err(UNKNOWN);
        }
    }
    Ok(())
}

fn init_in_a_thread() -> Answer {
    let thread = std::thread::spawn(|| {
        let init = own(c"cuInit");
        if init == 0 {
            return UNKNOWN.0;
        }
        // SAFETY: what the loader gives for the name: the driver's function, or one that stands for it.
        unsafe { std::mem::transmute::<usize, unsafe extern "C" fn(u32) -> u32>(init)(0) }
    });
    if thread.join().unwrap_or(UNKNOWN.0) == 0 { Ok(()) } else { Err(UNKNOWN) }
}
