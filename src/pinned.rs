//! Freed pinned host memory, kept for the next request of its size (on an H200, 64 MiB cost 38 ms to pin and 11 ms to unpin).
//!
//! The CPU may touch such memory the moment it is handed out, so being ordered is not enough: a block comes back only when all
//! work that any context had before its free is *finished*. `GPUPOOL_PINNED` bounds what is kept, in bytes; past it, and where it
//! cannot be told what has finished, the free goes to the driver.

use std::collections::HashMap;
use std::ffi::{c_uint, c_void};
use std::sync::Arc;

use once_cell::sync::Lazy;
use parking_lot::Mutex;

use crate::config::{self, FreeMode};
use crate::driver::{self, Context};
use crate::pool::Pool;
use crate::registry;
use crate::stats::{self, count};

/// Blocks are kept by size class: an eighth of a power of two, a page of the host at least.
const PAGE: usize = 4096;

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Kind {
    size: usize,
    flags: c_uint,
    ctx: Context,
}

/// A mark in every context that there was.
type Marks = Vec<(Arc<Pool>, u64)>;

struct Idle {
    address: usize,
    /// What must be finished: in every context that had a pool at the free.
    after: Marks,
}

#[derive(Default)]
struct Books {
    live: HashMap<usize, Kind>,
    idle: HashMap<Kind, Vec<Idle>>,
    kept: usize,
}

static BOOKS: Lazy<Mutex<Books>> = Lazy::new(Default::default);

fn class(size: usize) -> Option<usize> {
    let step = (size.checked_next_power_of_two()? / 16).max(PAGE);
    size.checked_next_multiple_of(step)
}

fn wanted() -> bool {
    // Who leans on the host wait of frees leans on this one's too.
    config::get().pinned > 0 && config::get().free != FreeMode::Sync
}

fn kind(size: usize, flags: c_uint) -> Option<Kind> {
    if size == 0 || size > config::get().pinned {
        return None;
    }
    let ctx = driver::present()?.ctx_current().ok()??;
    Some(Kind { size: class(size)?, flags, ctx })
}

/// A kept block of `size` bytes, if there is one that nothing uses any more.
pub fn take(out: *mut *mut c_void, size: usize, flags: c_uint) -> bool {
    if out.is_null() || !wanted() {
        return false;
    }
    let Some(kind) = kind(size, flags) else { return false };
    let candidates: Vec<(usize, Marks)> = {
        let books = BOOKS.lock();
        let idle = books.idle.get(&kind);
        idle.into_iter().flatten().map(|i| (i.address, i.after.clone())).collect()
    };
    for (address, after) in candidates {
        if !after.iter().all(|(pool, stamp)| pool.is_done(*stamp)) {
            continue;
        }
        let mut books = BOOKS.lock();
        let Some(idle) = books.idle.get_mut(&kind) else { return false };
        // Another thread may have taken it.
        let Some(at) = idle.iter().position(|i| i.address == address) else { continue };
        idle.swap_remove(at);
        books.kept -= kind.size;
        books.live.insert(address, kind);
        count(&stats::PINNED);
        count(&stats::PINNED_HITS);
        // SAFETY: not NULL; the caller's to be written.
        unsafe { out.write(address as *mut c_void) };
        return true;
    }
    false
}

/// A kept block, else one of `real`, which is asked for the size of the class and writes `out` itself.
pub fn allocate(out: *mut *mut c_void, size: usize, flags: c_uint, real: impl Fn(usize) -> u32) -> u32 {
    if take(out, size, flags) {
        return 0;
    }
    let kind = if out.is_null() || !wanted() { None } else { kind(size, flags) };
    let Some(kind) = kind else { return real(size) };
    count(&stats::PINNED);
    let mut code = real(kind.size);
    if code == 2 && give_back() {
        code = real(kind.size);
    }
    if code == 0 {
        // SAFETY: not NULL, and written by the real function.
        BOOKS.lock().live.insert(unsafe { *out } as usize, kind);
    }
    code
}

/// Keeps a freed block. False: the driver is to free it.
pub fn keep(address: usize) -> bool {
    let Some(kind) = BOOKS.lock().live.remove(&address) else { return false };
    // Work that no fence covers, a capture, an ending process: the driver's own free waits as it does.
    let Some(after) = marks() else { return false };
    let mut books = BOOKS.lock();
    if books.kept + kind.size > config::get().pinned {
        return false;
    }
    books.kept += kind.size;
    books.idle.entry(kind).or_default().push(Idle { address, after });
    true
}

/// What must be finished before memory that any context may use is free. None when that cannot be told.
fn marks() -> Option<Marks> {
    let d = driver::present()?;
    if crate::pool::fence::capturing() || !d.has_ctx_fences() {
        return None;
    }
    // Work of this context is covered by a pool of its own.
    registry::with_present_pool(|_| ())?;
    let pools = registry::pools();
    // A device at work without a pool: its work is not covered.
    let active = (0..d.device_count().ok()?).filter(|&o| d.primary_is_active(o) != Ok(false)).count();
    if active > pools.iter().filter(|p| p.is_primary()).count() {
        return None;
    }
    pools.into_iter().map(|pool| pool.mark().map(|stamp| (pool, stamp))).collect()
}

/// Host memory is short: everything kept goes back. False when nothing was kept.
fn give_back() -> bool {
    let idle = {
        let mut books = BOOKS.lock();
        books.kept = 0;
        std::mem::take(&mut books.idle)
    };
    let Some(d) = driver::present() else { return false };
    let mut any = false;
    for block in idle.into_values().flatten() {
        any = true;
        if let Err(e) = d.mem_free_host(block.address) {
            log::debug!("pinned memory could not be given back: {e:?}");
        }
    }
    any
}

/// The contexts that `dead` names are gone, and their pinned memory with them.
pub fn forget(dead: impl Fn(Context) -> bool) {
    let mut books = BOOKS.lock();
    books.live.retain(|_, kind| !dead(kind.ctx));
    let gone: Vec<Kind> = books.idle.keys().copied().filter(|k| dead(k.ctx)).collect();
    for kind in gone {
        let idle = books.idle.remove(&kind).map_or(0, |idle| idle.len());
        books.kept -= idle * kind.size;
    }
}
