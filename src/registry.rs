//! Which pool serves: context -> `Pool`.
//!
//! A pool is made at the first request in a context and lives until the context is seen dead. Contexts are told apart by
//! `cuCtxGetId`: after `cudaDeviceReset` the primary context comes back at the same address with another id, and the old
//! context's pool is abandoned, so that nothing of it is handed out again.
//!
//! The registry's lock is the outermost. It is held across no driver call.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use once_cell::sync::Lazy;
use parking_lot::{Mutex, RwLock};

use crate::config::{self, Backing};
use crate::driver::{self, CHANGES, Context, CuError, CurrentContext, DevicePtr, Driver, Stream, driver};
use crate::error::Error;
use crate::ipc;
use crate::pool::{EXPORTED, Pool, PoolStats, table};
use crate::source::{self, Source};
use crate::stats;

#[derive(Default)]
struct Pools {
    by_ctx: HashMap<Context, Arc<Pool>>,
    /// By what the records of a pool's blocks name as their space.
    by_space: HashMap<u16, Arc<Pool>>,
    /// Memory of the first is open to the kernels of the second, whether or not it has a pool yet.
    readers: Vec<(Context, Context)>,
}

static POOLS: Lazy<RwLock<Pools>> = Lazy::new(Default::default);
/// Primary contexts that a door asked for by device ordinal; each is retained once, for the life of the process.
static RETAINED: Lazy<Mutex<HashMap<i32, Context>>> = Lazy::new(Default::default);
/// Held by the background thread while it makes driver calls, and by whoever ends a context: no other thread waits for it.
static BACKGROUND: Mutex<()> = Mutex::new(());

/// The pool of the calling thread's current context. `Driver(201)` when there is none.
pub fn current_pool() -> Result<Arc<Pool>, Error> {
    let d = driver()?;
    let ctx = d.ctx_current()?.ok_or(CuError::INVALID_CONTEXT)?;
    pool_of(d, ctx)
}

/// The same for who stands in for the driver: None when the program did not get so far, or too far, for a pool. A thread remembers the
/// last one for as long as nothing died.
pub fn with_present_pool<R>(act: impl FnOnce(&Arc<Pool>) -> R) -> Option<R> {
    thread_local!(static LAST: Cell<Option<(u64, Arc<Pool>)>> = const { Cell::new(None) });
    let d = driver::present()?;
    let ctx = d.ctx_current().ok()??;
    let changes = CHANGES.load(Relaxed);
    let last = LAST.try_with(Cell::take).ok().flatten();
    let pool = match last {
        Some((then, pool)) if then == changes && pool.ctx() == ctx && crate::pool::deaths_are_seen() => pool,
        _ => pool_of(d, ctx).ok()?,
    };
    let result = act(&pool);
    let _ = LAST.try_with(|last| last.set(Some((changes, pool))));
    Some(result)
}

/// The pool that memory for `s` comes from: of the stream's own context when it names one, else of the current context.
pub fn pool_for_stream(s: Stream) -> Result<Arc<Pool>, Error> {
    if s == Stream::NULL || s == Stream::LEGACY || s == Stream::PER_THREAD {
        return current_pool();
    }
    let d = driver()?;
    let ctx = d.stream_ctx(s)?;
    pool_of(d, ctx)
}

/// The pool of a device's primary context, which is made when it does not exist yet.
pub fn pool_of_device(ordinal: i32) -> Result<Arc<Pool>, Error> {
    let d = driver()?;
    if d.ctx_current()?.is_some() && d.ctx_device()? == ordinal {
        return current_pool();
    }
    let known = RETAINED.lock().get(&ordinal).copied();
    let ctx = match known {
        Some(ctx) => ctx,
        None => {
            let ctx = d.primary_retain(ordinal)?;
            if RETAINED.lock().insert(ordinal, ctx).is_some() {
                // Another thread was faster: one reference is enough.
                d.primary_release(ordinal)?;
            }
            ctx
        }
    };
    pool_of(d, ctx)
}

/// The pool that `p` is a live block of.
pub fn owner_of(p: DevicePtr) -> Option<Arc<Pool>> {
    let (_, block) = table::find(p)?;
    POOLS.read().by_space.get(&block.space.load(Relaxed)).cloned()
}

/// The pool, the start and the bytes of the live block that holds `p`, which may lie inside it.
pub fn block_of(p: DevicePtr) -> Option<(Arc<Pool>, DevicePtr, usize)> {
    pools().into_iter().find_map(|pool| {
        let (base, size) = pool.block_of(p)?;
        Some((pool, base, size))
    })
}

/// Whether `p` lies in some pool's memory and in no live block: to the program there is nothing.
pub fn is_idle(p: DevicePtr) -> bool {
    block_of(p).is_none() && pools().iter().any(|pool| pool.holds(p))
}

/// Frees `p` in whichever pool holds it. `UnknownPointer` when none does.
pub fn free(p: DevicePtr, s: Stream) -> Result<(), Error> {
    // No call may reach the driver once the process began to exit.
    driver()?;
    let pool = owner_of(p).ok_or(Error::UnknownPointer)?;
    freeing(&pool, p, || pool.free(p, s))
}

/// A block that other processes may open can be opened no more once it is freed.
fn freeing(pool: &Pool, p: DevicePtr, free: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
    let shared = table::find(p).is_some_and(|(_, block)| block.special() & EXPORTED != 0);
    let key = shared.then(|| pool.serial_of(p));
    free()?;
    key.into_iter().for_each(ipc::withdraw);
    Ok(())
}

/// Frees `p` after all work submitted to its context so far, on every stream.
pub fn free_everyone(p: DevicePtr) -> Result<(), Error> {
    driver()?;
    let pool = owner_of(p).ok_or(Error::UnknownPointer)?;
    free_everyone_in(&pool, p)
}

/// The same for a pool that is known.
pub fn free_everyone_in(pool: &Pool, p: DevicePtr) -> Result<(), Error> {
    freeing(pool, p, || pool.free_everyone(p))
}

/// Marks `p` as used on `s` too, in whichever pool holds it.
pub fn record_stream(p: DevicePtr, s: Stream) -> Result<(), Error> {
    driver()?;
    owner_of(p).ok_or(Error::UnknownPointer)?.record_stream(p, s)
}

/// Every pool there is.
pub fn pools() -> Vec<Arc<Pool>> {
    POOLS.read().by_ctx.values().cloned().collect()
}

fn pool_of(d: &'static Driver, ctx: Context) -> Result<Arc<Pool>, Error> {
    let id = d.ctx_id(ctx)?;
    let known = POOLS.read().by_ctx.get(&ctx).cloned();
    match known {
        Some(pool) if pool.ctx_id() == id => Ok(pool),
        _ => make_pool(d, ctx, id),
    }
}

#[cold]
#[inline(never)]
fn make_pool(d: &'static Driver, ctx: Context, id: u64) -> Result<Arc<Pool>, Error> {
    let config = config::get();
    let ordinal = {
        let _ctx = CurrentContext::enter(d, ctx)?;
        d.ctx_device()?
    };
    let source: Arc<dyn Source> = if config.backing == Backing::Vmm && d.vmm_supported(ordinal) {
        Arc::new(source::vmm(d, ordinal)?)
    } else {
        Arc::new(source::device(d, ctx, ordinal))
    };
    let primary = is_primary(d, ctx, ordinal);
    let pool = Arc::new(Pool::new(d, ctx, id, (ordinal, primary), source, config)?);
    let (stale, readers) = {
        let mut pools = POOLS.write();
        match pools.by_ctx.get(&ctx) {
            // Another thread was faster.
            Some(other) if other.ctx_id() == id => return Ok(other.clone()),
            _ => {}
        }
        pools.by_space.insert(pool.space_id(), pool.clone());
        let stale = pools.by_ctx.insert(ctx, pool.clone());
        if let Some(stale) = &stale {
            pools.by_space.remove(&stale.space_id());
        }
        let readers: Vec<Context> = pools.readers.iter().filter(|r| r.0 == ctx).map(|r| r.1).collect();
        (stale, readers)
    };
    if let Some(dead) = stale {
        bury(&dead);
    }
    readers.into_iter().for_each(|reader| pool.open_to(reader));
    log::debug!("pool for device {ordinal}, context id {id}");
    watch_exit();
    background();
    Ok(pool)
}

fn is_primary(d: &Driver, ctx: Context, ordinal: i32) -> bool {
    if d.primary_is_active(ordinal) != Ok(true) {
        return false;
    }
    let primary = d.primary_retain(ordinal);
    if primary.is_ok()
        && let Err(e) = d.primary_release(ordinal)
    {
        log::debug!("the primary context of device {ordinal} stays retained: {e:?}");
    }
    primary == Ok(ctx)
}

// ---- what the doors see ----

/// Runs `end`, which ends a context: the pools that `dies` names are forgotten when it answers 0. Returns the answer, and the contexts
/// that had a pool.
pub fn contexts_die(dies: impl Fn(&Pool) -> bool, end: impl FnOnce() -> u32) -> (u32, Vec<Context>) {
    // Nobody works in the background on a context that goes away meanwhile.
    let _background = BACKGROUND.lock();
    let code = end();
    if code != 0 {
        return (code, Vec::new());
    }
    CHANGES.fetch_add(1, Relaxed);
    let dead: Vec<Arc<Pool>> = {
        let mut pools = POOLS.write();
        let dead: Vec<_> = pools.by_ctx.values().filter(|p| dies(p)).cloned().collect();
        for pool in &dead {
            pools.by_ctx.remove(&pool.ctx());
            pools.by_space.remove(&pool.space_id());
            pools.readers.retain(|r| r.0 != pool.ctx() && r.1 != pool.ctx());
        }
        dead
    };
    dead.iter().for_each(|pool| bury(pool));
    (code, dead.iter().map(|pool| pool.ctx()).collect())
}

fn bury(dead: &Pool) {
    log::info!(
        "a context of device {} was destroyed; its pool of {} bytes is forgotten",
        dead.ordinal(),
        dead.stats().held
    );
    if config::get().report {
        BURIED.lock().push((dead.ordinal(), dead.stats()));
    }
    dead.abandon();
}

/// What pools did whose contexts are gone, for the report.
static BURIED: Mutex<Vec<(i32, PoolStats)>> = Mutex::new(Vec::new());

/// Somebody else needs memory of the device: every pool gives back what is idle, waiting for its work if need be. False when there was
/// nothing.
pub fn give_way() -> bool {
    let mut given = 0;
    for pool in pools() {
        given += pool.give_way().unwrap_or_else(|e| {
            log::debug!("idle memory stays: {e}");
            0
        });
    }
    given > 0
}

/// Kernels of `reader` may use memory of `owner` from now on.
pub fn open_to(owner: Context, reader: Context) {
    let pool = {
        let mut pools = POOLS.write();
        pools.readers.push((owner, reader));
        pools.by_ctx.get(&owner).cloned()
    };
    if let Some(pool) = pool {
        pool.open_to(reader);
    }
}

/// Before a copy to the host: frees so far are done before it.
#[inline]
pub fn before_copy_to_host() {
    if crate::pool::any_open() {
        pools().iter().for_each(|pool| pool.before_copy_to_host());
    }
}

// ---- the background thread ----

/// Starts the thread that gives idle memory back, once a process, when the settings want it.
fn background() {
    static STARTED: Mutex<bool> = Mutex::new(false);
    let Some(decay) = config::get().decay_ms else { return };
    if std::mem::replace(&mut *STARTED.lock(), true) {
        return;
    }
    let interval = std::time::Duration::from_millis((decay / 2).max(1));
    if let Err(e) = crate::thread::background("gpupool", move || idle_memory_goes_back(interval)) {
        log::info!("no background thread: {e}; idle memory stays");
    }
}

fn idle_memory_goes_back(interval: std::time::Duration) {
    loop {
        // Asleep for good while no pool holds more than it needs.
        crate::pool::wait_for_growth();
        let mut quiet = 0;
        while quiet < 4 {
            std::thread::sleep(interval);
            let _background = BACKGROUND.lock();
            // Once the process exits, and in a child, the driver is not called.
            if driver().is_err() {
                return;
            }
            let mut more = false;
            for pool in pools() {
                // A context that nobody sees die must be one that never does.
                if pool.is_primary() || config::get().interpose == Some(true) || crate::pool::deaths_are_seen() {
                    more |= pool.decay().unwrap_or_else(|e| {
                        log::debug!("idle memory stays: {e}");
                        false
                    });
                }
            }
            quiet = if more { 0 } else { quiet + 1 };
        }
    }
}

// ---- exit ----

/// The background thread is out of the driver once the process began to exit.
fn watch_exit() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    // A second is more than any of its calls takes.
    ONCE.call_once(|| driver::at_exit(|| drop(BACKGROUND.try_lock_for(std::time::Duration::from_secs(1)))));
    report_at_exit();
}

/// Arranges for the report, if the settings want one.
pub fn report_at_exit() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    extern "C" fn at_exit() {
        if !driver::is_forked() {
            report();
        }
    }
    if config::get().report {
        // SAFETY: the handler makes no call into the driver; the library is never unloaded (-z nodelete).
        ONCE.call_once(|| unsafe {
            libc::atexit(at_exit);
        });
    }
}

/// `GPUPOOL_REPORT`: what was served, to standard error.
fn report() {
    use std::fmt::Write;
    let mut out = format!("gpupool: report of process {}, {}\n", std::process::id(), program_name());
    let alive = pools().into_iter().map(|p| (p.ordinal(), p.stats()));
    let pools: Vec<(i32, PoolStats)> = BURIED.lock().drain(..).chain(alive).collect();
    let total = pools.iter().map(|p| p.1).fold((0, 0), |sum, s| (sum.0 + s.mallocs, sum.1 + s.frees));
    let (runtime, of_driver) = (stats::RUNTIME.counts(), stats::DRIVER.counts());
    let rest = |all: u64, at: usize| all.saturating_sub(runtime[at] + of_driver[at]);
    let gpupool = [rest(total.0, 0), rest(total.1, 1), 0, 0];
    let doors = [("runtime", runtime), ("driver", of_driver), ("gpupool", gpupool), ("cnmem", stats::CNMEM.counts())];
    for (name, [mallocs, frees, foreign_mallocs, foreign_frees]) in doors {
        let _ = writeln!(
            out,
            "gpupool: {name} door: served {mallocs} mallocs {frees} frees, foreign {foreign_mallocs} mallocs {foreign_frees} frees"
        );
    }
    let (pinned, hits) = (stats::PINNED.load(Relaxed), stats::PINNED_HITS.load(Relaxed));
    let _ = writeln!(out, "gpupool: pinned memory: served {pinned}, from the cache {hits}");
    for (ordinal, s) in pools {
        let _ = writeln!(
            out,
            "gpupool: device {}: {} mallocs, {:.1} % from the cache, peak live {} MiB, peak held {} MiB, {} fences, {} waits",
            ordinal,
            s.mallocs,
            100.0 * s.mallocs.saturating_sub(s.grown) as f64 / s.mallocs.max(1) as f64,
            s.peak_live >> 20,
            s.peak_held >> 20,
            s.fences,
            s.waits
        );
    }
    let _ = std::io::Write::write_all(&mut std::io::stderr(), out.as_bytes());
}

/// The name that the program was started by, without its folders.
fn program_name() -> String {
    let path = std::env::args_os().next().unwrap_or_default();
    let name = std::path::Path::new(&path).file_name().unwrap_or_default().to_string_lossy();
    // The report is lines.
    name.replace(|c: char| c.is_control(), "?")
}
