//! The preload door: CUDA's own functions, served in any program that the library is preloaded into.
//!
//! | file | what |
//! |---|---|
//! | `resolve` | who gets ours instead of the driver's: `dlsym` (the only assembly), `cuGetProcAddress`, direct links |
//! | `memory` | allocation, questions about pointers, sharing between processes, peers, pinned memory |
//! | `order` | what the pool must see: copies to the host, streams and contexts that die, captures |
//! | `runtime` | `cudaMalloc`, `cudaFree` and the pinned calls of a shared runtime; fast path only |
//!
//! Every function forwards what is not its business to the definition that it stands before. Linked and not preloaded, all of them
//! only forward.

mod hooks;
mod memory;
mod order;
mod resolve;
mod runtime;

use std::ffi::CStr;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use crate::config;
use crate::linker;

/// Whether CUDA's functions are served: `GPUPOOL_INTERPOSE`, else whether the library was preloaded.
#[inline]
pub fn active() -> bool {
    match ACTIVE.load(Relaxed) {
        0 => decide(),
        known => known == 2,
    }
}

/// 0: not decided; 1: off; 2: on.
static ACTIVE: AtomicU8 = AtomicU8::new(0);
/// 0: the constructor did not run yet; 1: not preloaded; 2: preloaded.
static PRELOADED: AtomicU8 = AtomicU8::new(0);

#[cold]
#[inline(never)]
fn decide() -> bool {
    let on = config::get().interpose.unwrap_or_else(|| match PRELOADED.load(Relaxed) {
        // Another library's constructor was first.
        0 => preloaded(),
        known => known == 2,
    });
    ACTIVE.store(if on { 2 } else { 1 }, Relaxed);
    // The program calls CUDA: if a report is asked for, there is something to tell of, if only that nothing was served.
    crate::registry::report_at_exit();
    on
}

/// Whether `LD_PRELOAD` or `/etc/ld.so.preload` name this library.
fn preloaded() -> bool {
    let Some(mine) = linker::path_of(preloaded as *const () as usize) else { return false };
    let real = std::fs::canonicalize(&mine).unwrap_or_else(|_| mine.clone());
    let listed = std::env::var("LD_PRELOAD").unwrap_or_default();
    let system = std::fs::read_to_string("/etc/ld.so.preload").unwrap_or_default();
    let separate = |c: char| c == ':' || c.is_whitespace();
    listed.split(separate).chain(system.split(separate)).filter(|e| !e.is_empty()).any(|entry| {
        let path = std::path::Path::new(entry);
        // A bare name, or one with $ORIGIN and the like, was found by the linker: its file name has to do.
        match std::fs::canonicalize(path) {
            Ok(path) if entry.contains('/') => path == real,
            _ => path.file_name().is_some_and(|name| Some(name) == mine.file_name() || Some(name) == real.file_name()),
        }
    })
}

/// Reads `LD_PRELOAD` before the program can change it. Nothing else happens when the library is loaded.
#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = {
    extern "C" fn at_load() {
        let preloaded = preloaded();
        PRELOADED.store(if preloaded { 2 } else { 1 }, Relaxed);
        // Settings are read, and complained of, at the first CUDA call; this one decides what the doors see from the start.
        if preloaded && std::env::var_os("GPUPOOL_INTERPOSE").is_none_or(|v| v != "0") {
            crate::pool::see_deaths();
        }
    }
    at_load
};

/// `cudaErrorSharedObjectSymbolNotFound`: a forwarded function has no definition after ours.
const NOT_FOUND: u32 = 302;

/// The library that functions called `name` come from.
fn library(name: &CStr) -> &'static str {
    if name.to_bytes().starts_with(b"cuda") { "libcudart.so" } else { "libcuda.so" }
}
