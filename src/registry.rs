//! Which pool serves: context -> `Pool`.
//!
//! A pool is made at the first request in a context and lives until the context is seen dead. Contexts are told apart by
//! `cuCtxGetId`: after `cudaDeviceReset` the primary context comes back at the same address with another id, and the old
//! context's pool is abandoned, so that nothing of it is handed out again.
//!
//! The registry's lock is the outermost. It is held across no driver call.

use std::collections::HashMap;
use std::sync::Arc;

use once_cell::sync::Lazy;
use parking_lot::{Mutex, RwLock};

use crate::config::{self, Backing};
use crate::driver::{Context, CuError, CurrentContext, DevicePtr, Driver, Stream, driver};
use crate::error::Error;
use crate::pool::Pool;
use crate::source::{self, Source};

static POOLS: Lazy<RwLock<HashMap<Context, Arc<Pool>>>> = Lazy::new(Default::default);
/// Primary contexts that a door asked for by device ordinal; each is retained once, for the life of the process.
static RETAINED: Lazy<Mutex<HashMap<i32, Context>>> = Lazy::new(Default::default);

/// The pool of the calling thread's current context. `Driver(201)` when there is none.
pub fn current_pool() -> Result<Arc<Pool>, Error> {
    let d = driver()?;
    let ctx = d.ctx_current()?.ok_or(CuError::INVALID_CONTEXT)?;
    pool_of(d, ctx)
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

/// Frees `p` in whichever pool holds it. `UnknownPointer` when none does.
pub fn free(p: DevicePtr, s: Stream) -> Result<(), Error> {
    in_owning_pool(|pool| pool.free(p, s))
}

/// Frees `p` after all work submitted to its context so far, on every stream.
pub fn free_everywhere(p: DevicePtr) -> Result<(), Error> {
    in_owning_pool(|pool| pool.free_everyone(p))
}

/// Marks `p` as used on `s` too, in whichever pool holds it.
pub fn record_stream(p: DevicePtr, s: Stream) -> Result<(), Error> {
    in_owning_pool(|pool| pool.record_stream(p, s))
}

fn in_owning_pool(mut act: impl FnMut(&Pool) -> Result<(), Error>) -> Result<(), Error> {
    // No call may reach the driver once the process began to exit.
    driver()?;
    // One pool is the usual case; pointers of different pools never meet, so the order does not matter.
    let pools = POOLS.read();
    if pools.len() == 1 {
        let only = pools.values().next().expect("one pool").clone();
        drop(pools);
        return act(&only);
    }
    let all: Vec<Arc<Pool>> = pools.values().cloned().collect();
    drop(pools);
    all.iter()
        .map(|pool| act(pool))
        .find(|r| !matches!(r, Err(Error::UnknownPointer)))
        .unwrap_or(Err(Error::UnknownPointer))
}

/// Every pool there is.
pub fn pools() -> Vec<Arc<Pool>> {
    POOLS.read().values().cloned().collect()
}

fn pool_of(d: &'static Driver, ctx: Context) -> Result<Arc<Pool>, Error> {
    let id = d.ctx_id(ctx)?;
    let known = POOLS.read().get(&ctx).cloned();
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
    let pool = Arc::new(Pool::new(d, ctx, id, ordinal, source, config)?);
    let stale = {
        let mut pools = POOLS.write();
        match pools.get(&ctx) {
            // Another thread was faster.
            Some(other) if other.ctx_id() == id => return Ok(other.clone()),
            _ => pools.insert(ctx, pool.clone()),
        }
    };
    if let Some(dead) = stale {
        log::info!(
            "the context of device {ordinal} was destroyed; its pool of {} bytes is forgotten",
            dead.stats().held
        );
        dead.abandon();
    }
    log::debug!("pool for device {ordinal}, context id {id}");
    Ok(pool)
}
