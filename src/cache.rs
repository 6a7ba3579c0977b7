//! Magazines: ready blocks by thread, stream and bin, in front of the pool. A hit takes no lock, makes no driver call beyond finding
//! out that the stream is still the same one, and no atomic read-modify-write.
//!
//! A thread's free puts the block on the magazine of its bin and of the stream it names; the thread's next malloc of that bin on that
//! stream takes it off again. That is contract 2: later work on a stream may reuse what was freed on it, at once. Full magazines
//! give half to the pool's bins, empty ones take from there. A block may be freed by another thread than allocated it: it goes where
//! it was freed.
//!
//! # Is it still that stream?
//! A handle comes back for another stream. Where the doors see streams die and captures begin (preload), a counter tells that nothing
//! of the kind happened since the magazines were last verified (`CHANGES`). Elsewhere every malloc asks the driver for the stream's id
//! (58 ns with the question whether it is being captured, which must come first). A free does not ask: should the handle have
//! changed hands, the next malloc finds out, and all that was freed under it goes back to the pool, stamped then.
//! What is allocated in a capture never comes here (`Block::special`).
//!
//! # Others
//! Memory pressure, a trim and the count of what is idle reach into the magazines of threads that may be asleep: `handover.rs`.
//! What one stream's magazines of a thread hold is bounded, by block and by byte.

mod handover;

use std::cell::{Cell, UnsafeCell};
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use parking_lot::Mutex;

use crate::arch;
use crate::driver::{self, CHANGES, DevicePtr, Driver, Stream};
use crate::error::Error;
use crate::pool::space::GRANULE;
use crate::pool::table::{self, Block, BlockId, State};
use crate::pool::{self, Magazines, Pool, PoolStats, User};
use crate::registry;
use crate::sync::Barrier;
use handover::Handover;

/// Blocks in a magazine at most, and bytes, but for two blocks.
const BLOCKS: usize = 32;
const BYTES: usize = 16 << 20;
/// All magazines of one thread and stream: this share of the pool's live peak, within bounds.
const SHARE: u64 = 4;
const SHARE_BOUNDS: (u64, u64) = (64 << 20, 256 << 20);
/// Streams that a thread keeps magazines for; the least recently used give theirs back.
const STREAMS: usize = 16;

// ---- the hot paths ----

/// A block of `size` bytes off a magazine of this thread. None: the long way.
#[inline]
pub fn malloc(size: usize, s: Stream) -> Option<DevicePtr> {
    let local = here()?;
    let inside = local.enter()?;
    let desk = inside.front(s)?;
    let bin = desk.pool.bin_of(size)?;
    if !desk.is_current(s) {
        return None;
    }
    let ready = desk.pop(bin)?;
    desk.counters.add(&desk.counters.mallocs, 1);
    desk.last = (ready, bin);
    table::block(ready.block).set_state(State::Live);
    Some(ready.addr)
}

/// Puts a block on a magazine of this thread. False: the long way.
#[inline]
pub fn free(p: DevicePtr, s: Stream) -> bool {
    let Some(local) = here() else { return false };
    let Some(inside) = local.enter() else { return false };
    let Some(desk) = inside.front(s) else { return false };
    // What was taken last is often freed first: then nothing need be looked up.
    let (ready, bin) = if p == desk.last.0.addr { desk.last } else { found(p) };
    let block = table::block(ready.block);
    // The record of what was taken last may be another block's by now.
    if block.state() != State::Live
        || block.addr.load(Relaxed) != p
        || block.special.load(Relaxed) != 0
        || block.space.load(Relaxed) != desk.space
        || !desk.is_current_for_free(s)
        || !desk.push(ready, bin)
    {
        return false;
    }
    desk.counters.add(&desk.counters.frees, 1);
    true
}

/// The block in use that starts at `p`, and its bin; of anything else, block 0, which is never live.
#[inline]
fn found(p: DevicePtr) -> (Ready, usize) {
    let Some((b, block)) = table::find(p) else { return (NOTHING, 0) };
    // Without a bin, there is no magazine of that number.
    (Ready::of(b, block), (block.bin.load(Relaxed) as usize).wrapping_sub(1))
}

// ---- a thread's magazines ----

/// The magazines of one stream.
struct Desk {
    /// The handle that the program passes.
    handle: usize,
    /// For handles that mean another stream in every context: the context.
    ctx: usize,
    /// The stream's key in the pool.
    key: u64,
    /// `CHANGES` when that was last verified.
    changes: u64,
    driver: &'static Driver,
    pool: Arc<Pool>,
    space: u16,
    limit: u64,
    counters: Arc<Counters>,
    magazines: Box<[Magazine]>,
    /// What was taken last, and its bin.
    last: (Ready, usize),
}

struct Magazine {
    count: u32,
    capacity: u32,
    ready: [Ready; BLOCKS],
}

/// A cached block, with what a hit needs of it.
#[derive(Clone, Copy)]
struct Ready {
    addr: DevicePtr,
    block: BlockId,
    /// In granules, which fits.
    granules: u32,
}

const NOTHING: Ready = Ready { addr: 0, block: table::NIL, granules: 0 };

impl Ready {
    #[inline]
    fn of(b: BlockId, block: &Block) -> Ready {
        let granules = (block.size.load(Relaxed) / GRANULE as u64) as u32;
        Ready { addr: block.addr.load(Relaxed), block: b, granules }
    }
}

/// What other threads may read of a desk. Only the thread itself writes.
#[derive(Default)]
struct Counters {
    /// Bytes on the magazines.
    cached: AtomicU64,
    /// All of them hits.
    mallocs: AtomicU64,
    frees: AtomicU64,
}

impl Counters {
    /// One writer: a load and a store, no read-modify-write.
    #[inline]
    fn add(&self, n: &AtomicU64, more: u64) {
        n.store(n.load(Relaxed).wrapping_add(more), Relaxed);
    }
}

impl Desk {
    #[inline]
    fn pop(&mut self, bin: usize) -> Option<Ready> {
        let magazine = self.magazines.get_mut(bin)?;
        let count = magazine.count.checked_sub(1)?;
        let ready = *magazine.ready.get(count as usize)?;
        magazine.count = count;
        self.counters.add(&self.counters.cached, (u64::from(ready.granules) * GRANULE as u64).wrapping_neg());
        Some(ready)
    }

    #[inline(always)]
    fn push(&mut self, ready: Ready, bin: usize) -> bool {
        let size = u64::from(ready.granules) * GRANULE as u64;
        let Some(magazine) = self.magazines.get_mut(bin) else { return false };
        if magazine.count >= magazine.capacity || self.counters.cached.load(Relaxed) + size > self.limit {
            return false;
        }
        let Some(place) = magazine.ready.get_mut(magazine.count as usize) else { return false };
        *place = ready;
        magazine.count += 1;
        table::block(ready.block).set_state(State::Cached);
        self.counters.add(&self.counters.cached, size);
        true
    }

    /// Whether the handle still means this stream, in no capture.
    #[inline(always)]
    fn is_current(&self, s: Stream) -> bool {
        if self.changes != CHANGES.load(Relaxed) {
            return false;
        }
        (!is_implicit(s) || self.is_here()) && (pool::deaths_are_seen() || self.is_same(s))
    }

    /// The desk's context is current.
    fn is_here(&self) -> bool {
        self.driver.ctx_current().is_ok_and(|c| c.is_some_and(|c| c.0 == self.ctx))
    }

    /// The driver is asked.
    fn is_same(&self, s: Stream) -> bool {
        match s {
            Stream::NULL | Stream::LEGACY => self.driver.ctx_id(self.pool.ctx()) == Ok(self.pool.ctx_id()),
            _ => self.pool.stream_key(s) == Ok(self.key),
        }
    }

    /// The same for a free, which may be wrong about the handle: see the top of the file.
    #[inline(always)]
    fn is_current_for_free(&self, s: Stream) -> bool {
        self.changes == CHANGES.load(Relaxed) && (!is_implicit(s) || self.is_here())
    }

    /// Takes at least half of the magazine `bin`, or everything, off.
    fn spill(&mut self, bin: Option<usize>) -> Vec<BlockId> {
        let mut out = Vec::new();
        for (i, magazine) in self.magazines.iter_mut().enumerate() {
            let keep = match bin {
                Some(bin) if bin != i => continue,
                Some(_) => magazine.count as usize / 2,
                None => 0,
            };
            // The least recently freed go.
            let going = magazine.count as usize - keep;
            out.extend(magazine.ready[..going].iter().map(|ready| ready.block));
            magazine.ready.copy_within(going..magazine.count as usize, 0);
            magazine.count = keep as u32;
        }
        let bytes: u64 = out.iter().map(|&b| table::block(b).size.load(Relaxed)).sum();
        self.counters.add(&self.counters.cached, bytes.wrapping_neg());
        out
    }

    fn give_back(&mut self, bin: Option<usize>) {
        let blocks = self.spill(bin);
        self.pool.put_back(self.key, &blocks);
    }
}

/// Handles that stand for a stream of the current context.
#[inline]
fn is_implicit(s: Stream) -> bool {
    s.0 <= Stream::PER_THREAD.0
}

/// One thread's.
struct Local {
    handover: Handover,
    /// Touched by the thread while it is inside, and by others while it is kept out.
    desks: UnsafeCell<Vec<Desk>>,
    /// What others may read of the desks: the space, and its counters.
    shared: Mutex<Vec<(u16, Arc<Counters>)>>,
}

// SAFETY: `desks` is guarded by `handover`; the rest is made for sharing.
unsafe impl Sync for Local {}
// SAFETY: nothing in it belongs to the thread that made it.
unsafe impl Send for Local {}

/// The thread is inside: the desks are its own until this is dropped.
struct Inside<'a>(&'a Local);

impl<'a> Inside<'a> {
    #[allow(clippy::mut_from_ref)] // one `Inside` a thread, and one use of it at a time
    #[inline]
    fn desks(&self) -> &'a mut Vec<Desk> {
        // SAFETY: the thread is inside, others are kept out, and no second reference is alive: each use below ends first.
        unsafe { &mut *self.0.desks.get() }
    }

    /// The desk of a stream, which becomes the first.
    #[inline]
    fn front(&self, s: Stream) -> Option<&'a mut Desk> {
        let desks = self.desks();
        if desks.first()?.handle != s.0 {
            bring_forward(desks, s)?;
        }
        desks.first_mut()
    }
}

#[cold]
#[inline(never)]
fn bring_forward(desks: &mut [Desk], s: Stream) -> Option<()> {
    let at = desks.iter().position(|d| d.handle == s.0)?;
    desks[..=at].rotate_right(1);
    Some(())
}

impl Drop for Inside<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.handover.leave();
    }
}

impl Local {
    #[inline]
    fn enter(&self) -> Option<Inside<'_>> {
        self.handover.enter().then_some(Inside(self))
    }
}

impl Magazines for Local {
    fn count(&self, pool: &Pool, into: &mut PoolStats) {
        for (_, c) in self.shared.lock().iter().filter(|(space, _)| *space == pool.space_id()) {
            into.cached += c.cached.load(Relaxed);
            into.mallocs += c.mallocs.load(Relaxed);
            into.frees += c.frees.load(Relaxed);
            into.hits += c.mallocs.load(Relaxed);
        }
    }

    fn drain(&self, pool: &Pool) {
        self.handover.while_out(|| {
            // SAFETY: the owner is out and kept out.
            let desks = unsafe { &mut *self.desks.get() };
            desks.iter_mut().filter(|d| d.space == pool.space_id()).for_each(|d| d.give_back(None));
        });
    }
}

thread_local! {
    static OWNER: Owner = const { Owner(Cell::new(None)) };
}

/// Gives everything back when the thread ends.
struct Owner(Cell<Option<Arc<Local>>>);

impl Drop for Owner {
    fn drop(&mut self) {
        arch::set_thread_word(std::ptr::null());
        if let Some(local) = self.0.take() {
            local.handover.enter_slow();
            let desks = std::mem::take(Inside(&local).desks());
            desks.into_iter().for_each(|desk| local.close(desk));
        }
    }
}

#[inline]
fn here() -> Option<&'static Local> {
    let local = arch::thread_word() as *const Local;
    // SAFETY: set while the thread's `Owner` keeps the Arc alive, and only this thread follows it.
    unsafe { local.as_ref() }
}

// ---- the long way ----

/// Memory for work on `s`, off the magazines or not. As `Pool::malloc`.
#[cold]
#[inline(never)]
pub fn malloc_slow(size: usize, s: Stream) -> Result<DevicePtr, Error> {
    if let Some(local) = here() {
        local.handover.enter_slow();
        let inside = Inside(local);
        if let Some(desk) = inside.front(s)
            && desk.is_current(s)
        {
            let want = desk.pool.request(size)?;
            if let Some(p) = want.bin.and_then(|bin| desk.take(bin)) {
                return Ok(p);
            }
            // Out again before the pool is asked: short of memory, it empties magazines, these too.
            let (pool, key) = (desk.pool.clone(), desk.key);
            drop(inside);
            return pool.malloc_for(want, User::Stream(key, s));
        }
    }
    let pool = registry::pool_for_stream(s)?;
    let want = pool.request(size)?;
    let key = pool.stream_key(s)?;
    if let Some(bin) = want.bin
        && !pool::is_capture(key)
        && let Some(local) = local()
    {
        local.handover.enter_slow();
        let inside = Inside(local);
        if let Some(p) = local.desk(&inside, &pool, s, key).take(bin) {
            return Ok(p);
        }
    }
    pool.malloc_for(want, User::Stream(key, s))
}

/// As `registry::free`.
#[cold]
#[inline(never)]
pub fn free_slow(p: DevicePtr, s: Stream) -> Result<(), Error> {
    driver::driver()?;
    let (ready, bin) = found(p);
    if ready.block == table::NIL {
        // Before the first pool there are no records to look at.
        return registry::free(p, s);
    }
    let block = table::block(ready.block);
    if block.state() != State::Live || block.special.load(Relaxed) != 0 || bin == usize::MAX {
        return registry::free(p, s);
    }
    if let Some(local) = here() {
        local.handover.enter_slow();
        let inside = Inside(local);
        if let Some(desk) = inside.front(s)
            && desk.is_current_for_free(s)
            && desk.space == block.space.load(Relaxed)
            && desk.put(ready, bin)
        {
            return Ok(());
        }
    }
    if let Some(pool) = registry::owner_of(p)
        && let Some(local) = local()
    {
        let key = pool.stream_key(s)?;
        // A stream of another context gets no magazines of this pool.
        let same = || match is_implicit(s) {
            true => pool.is_current(),
            false => registry::pool_for_stream(s).is_ok_and(|of| of.space_id() == pool.space_id()),
        };
        if !pool::is_capture(key) && same() {
            local.handover.enter_slow();
            let inside = Inside(local);
            if local.desk(&inside, &pool, s, key).put(ready, bin) {
                return Ok(());
            }
        }
    }
    registry::free(p, s)
}

impl Desk {
    /// A block off the magazine, which is filled from the pool's bin when it is empty.
    fn take(&mut self, bin: usize) -> Option<DevicePtr> {
        let ready = self.pop(bin).or_else(|| self.refill(bin))?;
        self.counters.add(&self.counters.mallocs, 1);
        table::block(ready.block).set_state(State::Live);
        Some(ready.addr)
    }

    /// A block onto the magazine, which gives half to the pool's bin when it is full; when all of them hold too much, every one
    /// does.
    fn put(&mut self, ready: Ready, bin: usize) -> bool {
        let mut done = self.push(ready, bin);
        if !done && self.magazines.get(bin).is_some_and(|m| m.count >= m.capacity) {
            self.give_back(Some(bin));
            done = self.push(ready, bin);
        }
        if !done {
            (0..self.magazines.len()).for_each(|bin| self.give_back(Some(bin)));
            done = self.push(ready, bin);
        }
        if done {
            self.counters.add(&self.counters.frees, 1);
        }
        done
    }
}

impl Desk {
    /// Half a magazine out of the pool's bin, and one block of it.
    fn refill(&mut self, bin: usize) -> Option<Ready> {
        let mut blocks = Vec::new();
        self.pool.lend(self.key, bin, self.magazines[bin].capacity as usize / 2 + 1, &mut blocks);
        let one = blocks.pop()?;
        for b in blocks {
            if !self.push(Ready::of(b, table::block(b)), bin) {
                self.pool.put_back(self.key, &[b]);
            }
        }
        Some(Ready::of(one, table::block(one)))
    }
}

impl Local {
    /// The verified desk of stream `s`, made at first use. What was freed under a handle that means another stream by now goes back.
    fn desk<'a>(&self, inside: &Inside<'a>, pool: &Arc<Pool>, s: Stream, key: u64) -> &'a mut Desk {
        let changes = CHANGES.load(Relaxed);
        let ctx = if is_implicit(s) { pool.ctx().0 } else { 0 };
        if let Some(desk) = inside.front(s) {
            if desk.key == key && desk.space == pool.space_id() && desk.ctx == ctx {
                desk.changes = changes;
                desk.limit = limit(pool);
                return desk;
            }
            self.close(inside.desks().remove(0));
        }
        let desks = inside.desks();
        if desks.len() == STREAMS
            && let Some(last) = desks.pop()
        {
            self.close(last);
        }
        let counters = Arc::new(Counters::default());
        self.shared.lock().push((pool.space_id(), counters.clone()));
        let magazine = |size: usize| Magazine {
            count: 0,
            capacity: (BYTES / size).clamp(2, BLOCKS) as u32,
            ready: [NOTHING; BLOCKS],
        };
        let desk = Desk {
            handle: s.0,
            ctx,
            key,
            changes,
            driver: pool.driver(),
            space: pool.space_id(),
            limit: limit(pool),
            counters,
            magazines: pool.bin_sizes().iter().map(|&size| magazine(size)).collect(),
            pool: pool.clone(),
            last: (NOTHING, 0),
        };
        desks.insert(0, desk);
        inside.front(s).expect("it was just made")
    }

    fn close(&self, mut desk: Desk) {
        desk.give_back(None);
        self.shared.lock().retain(|(_, c)| !Arc::ptr_eq(c, &desk.counters));
        let c = &desk.counters;
        desk.pool.note(c.mallocs.load(Relaxed), c.frees.load(Relaxed));
    }
}

fn limit(pool: &Pool) -> u64 {
    (pool.peak_live() / SHARE).clamp(SHARE_BOUNDS.0, SHARE_BOUNDS.1).min(pool.max_cached())
}

/// This thread's magazines, made at first use. None while the thread ends.
fn local() -> Option<&'static Local> {
    if let Some(local) = here() {
        return Some(local);
    }
    OWNER
        .try_with(|owner| {
            let local = Arc::new(Local {
                handover: Handover::new(Barrier::new()),
                desks: UnsafeCell::new(Vec::new()),
                shared: Mutex::default(),
            });
            pool::attach(Arc::downgrade(&local) as _);
            arch::set_thread_word(Arc::as_ptr(&local) as *const c_void);
            owner.0.set(Some(local));
        })
        .ok()?;
    here()
}
