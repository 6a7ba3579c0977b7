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
use crate::pool::bins;
use crate::pool::table::{self, BlockId, entry};
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

/// A block of `size` bytes off a magazine of this thread. None: the long way, for size 0 too.
#[inline(always)]
pub fn malloc(size: usize, s: Stream) -> Option<DevicePtr> {
    let local = here()?;
    let inside = local.enter()?;
    let desk = inside.at_hand(s)?;
    let bin = *desk.bins.get(bins::granules(size))?;
    desk.pop(bin as usize)
}

/// Puts a block on a magazine of this thread. False: the long way.
#[inline(always)]
pub fn free(p: DevicePtr, s: Stream) -> bool {
    let Some(local) = here() else { return false };
    let Some(inside) = local.enter() else { return false };
    let Some(desk) = inside.at_hand(s) else { return false };
    let Some(cell) = table::at(p) else { return false };
    desk.push(p, cell)
}

// ---- a thread's magazines ----

/// The magazines of one stream.
struct Desk {
    /// The handle, while it alone tells that this is the stream, as long as `CHANGES` is `changes`; else `ASK`.
    known: usize,
    changes: u64,
    /// What the entries of this pool's plain live blocks have in common.
    expected: u64,
    /// The bin of every size, by granules.
    bins: Arc<[u16]>,
    /// By bin.
    magazines: Box<[Magazine]>,
    /// `BLOCKS` places for each magazine.
    ready: Box<[Ready]>,
    counters: Arc<Counters>,
    limit: u64,
    // So far for every hit; the rest for the long way.
    /// The handle that the program passes.
    handle: usize,
    /// For handles that mean another stream in every context: the context.
    ctx: usize,
    /// The stream's key in the pool.
    key: u64,
    driver: &'static Driver,
    pool: Arc<Pool>,
    space: u16,
}

/// No stream's handle.
const ASK: usize = usize::MAX;

struct Magazine {
    count: u32,
    capacity: u32,
    /// Bytes of each block.
    size: u64,
}

/// A cached block, with its place in the table.
#[derive(Clone, Copy)]
struct Ready {
    addr: DevicePtr,
    cell: &'static AtomicU64,
}

impl Ready {
    fn of(b: BlockId) -> Ready {
        let addr = table::block(b).addr.load(Relaxed);
        Ready { addr, cell: table::at(addr).expect("a block in use is in the table") }
    }
    fn block(&self) -> BlockId {
        entry::block(self.cell.load(Relaxed))
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
    /// A block off the magazine; it is live.
    #[inline(always)]
    fn pop(&mut self, bin: usize) -> Option<DevicePtr> {
        let magazine = self.magazines.get_mut(bin)?;
        let count = magazine.count.checked_sub(1)?;
        let ready = *self.ready.get(bin * BLOCKS + count as usize)?;
        magazine.count = count;
        self.counters.add(&self.counters.cached, magazine.size.wrapping_neg());
        self.counters.add(&self.counters.mallocs, 1);
        entry::set_cached(ready.cell, false);
        Some(ready.addr)
    }

    /// The block that starts at `p`, if it is this pool's, live and as others, onto its magazine.
    #[inline(always)]
    fn push(&mut self, p: DevicePtr, cell: &'static AtomicU64) -> bool {
        let e = cell.load(Relaxed);
        if !entry::is_plain(e, p, self.expected) {
            return false;
        }
        // Without a bin, there is no magazine of that number.
        let bin = entry::bin(e).wrapping_sub(1);
        let Some(magazine) = self.magazines.get_mut(bin) else { return false };
        if magazine.count >= magazine.capacity || self.counters.cached.load(Relaxed) + magazine.size > self.limit {
            return false;
        }
        let Some(place) = self.ready.get_mut(bin * BLOCKS + magazine.count as usize) else { return false };
        *place = Ready { addr: p, cell };
        magazine.count += 1;
        self.counters.add(&self.counters.cached, magazine.size);
        self.counters.add(&self.counters.frees, 1);
        entry::set_cached(cell, true);
        true
    }

    /// Whether the handle still means this stream, in no capture.
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
    fn is_current_for_free(&self, s: Stream) -> bool {
        self.changes == CHANGES.load(Relaxed) && (!is_implicit(s) || self.is_here())
    }

    /// Takes at least half of the magazine `bin`, or everything, off.
    fn spill(&mut self, bin: Option<usize>) -> Vec<BlockId> {
        let (mut out, mut bytes) = (Vec::new(), 0);
        for (i, magazine) in self.magazines.iter_mut().enumerate() {
            let keep = match bin {
                Some(bin) if bin != i => continue,
                Some(_) => magazine.count as usize / 2,
                None => 0,
            };
            // The least recently freed go.
            let going = magazine.count as usize - keep;
            let places = &mut self.ready[i * BLOCKS..i * BLOCKS + magazine.count as usize];
            out.extend(places[..going].iter().map(Ready::block));
            places.copy_within(going.., 0);
            magazine.count = keep as u32;
            bytes += magazine.size * going as u64;
        }
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

    /// The first desk, if it is the stream's and nothing need be asked to know that.
    #[inline(always)]
    fn at_hand(&self, s: Stream) -> Option<&'a mut Desk> {
        let desk = self.desks().first_mut()?;
        (desk.known == s.0 && desk.changes == CHANGES.load(Relaxed)).then_some(desk)
    }

    /// The desk of a stream, which becomes the first.
    fn front(&self, s: Stream) -> Option<&'a mut Desk> {
        let desks = self.desks();
        let at = desks.iter().position(|d| d.handle == s.0)?;
        if at > 0 {
            desks[..=at].rotate_right(1);
        }
        desks.first_mut()
    }
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

// ---- the longer way: another stream than last time, or one that must be asked for ----

/// As `malloc`. None: the long way.
#[inline]
pub fn malloc_asking(size: usize, s: Stream) -> Option<DevicePtr> {
    let local = here()?;
    let inside = local.enter()?;
    let desk = inside.front(s)?;
    let bin = desk.pool.bin_of(size)?;
    if desk.is_current(s) { desk.pop(bin) } else { None }
}

/// As `free`. False: the long way.
#[inline]
pub fn free_asking(p: DevicePtr, s: Stream) -> bool {
    let Some(local) = here() else { return false };
    let Some(inside) = local.enter() else { return false };
    let Some(desk) = inside.front(s) else { return false };
    let Some(cell) = table::at(p) else { return false };
    desk.is_current_for_free(s) && desk.push(p, cell)
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
    let Some((cell, space, bin)) = plain(p) else { return registry::free(p, s) };
    if let Some(local) = here() {
        local.handover.enter_slow();
        let inside = Inside(local);
        if let Some(desk) = inside.front(s)
            && desk.is_current_for_free(s)
            && desk.space == space
            && desk.put(p, cell, bin)
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
            if local.desk(&inside, &pool, s, key).put(p, cell, bin) {
                return Ok(());
            }
        }
    }
    registry::free(p, s)
}

/// The entry, the space and the bin of the live block that starts at `p`, if it has a bin and is as others.
fn plain(p: DevicePtr) -> Option<(&'static AtomicU64, u16, usize)> {
    let (cell, (_, block)) = (table::at(p)?, table::find(p)?);
    let space = block.space.load(Relaxed);
    let e = cell.load(Relaxed);
    let bin = entry::bin(e).checked_sub(1)?;
    entry::is_plain(e, p, entry::expected(space)).then_some((cell, space, bin))
}

impl Desk {
    /// A block off the magazine, which is filled from the pool's bin when it is empty.
    fn take(&mut self, bin: usize) -> Option<DevicePtr> {
        self.pop(bin).or_else(|| {
            self.refill(bin);
            self.pop(bin)
        })
    }

    /// A block onto the magazine, which gives half to the pool's bin when it is full; when all of them hold too much, every one
    /// does.
    fn put(&mut self, p: DevicePtr, cell: &'static AtomicU64, bin: usize) -> bool {
        let mut done = self.push(p, cell);
        if !done && self.magazines.get(bin).is_some_and(|m| m.count >= m.capacity) {
            self.give_back(Some(bin));
            done = self.push(p, cell);
        }
        if !done {
            (0..self.magazines.len()).for_each(|bin| self.give_back(Some(bin)));
            done = self.push(p, cell);
        }
        done
    }

    /// Half a magazine, and one block more, out of the pool's bin.
    fn refill(&mut self, bin: usize) {
        let Some(magazine) = self.magazines.get(bin) else { return };
        let (size, mut blocks) = (magazine.size, Vec::new());
        self.pool.lend(self.key, bin, magazine.capacity as usize / 2 + 1, &mut blocks);
        let held = self.counters.cached.load(Relaxed);
        // One in any case: it is about to be taken.
        let room = (self.limit.saturating_sub(held) / size).max(1);
        let too_many = blocks.len().saturating_sub(room as usize);
        let back: Vec<BlockId> = blocks.drain(..too_many).collect();
        self.pool.put_back(self.key, &back);
        let magazine = &mut self.magazines[bin];
        for b in blocks {
            self.ready[bin * BLOCKS + magazine.count as usize] = Ready::of(b);
            magazine.count += 1;
            self.counters.add(&self.counters.cached, size);
        }
    }
}

impl Local {
    /// The verified desk of stream `s`, made at first use. What was freed under a handle that means another stream by now goes back.
    fn desk<'a>(&self, inside: &Inside<'a>, pool: &Arc<Pool>, s: Stream, key: u64) -> &'a mut Desk {
        let changes = CHANGES.load(Relaxed);
        let ctx = if is_implicit(s) { pool.ctx().0 } else { 0 };
        if let Some(desk) = inside.front(s) {
            if desk.key == key && desk.space == pool.space_id() && desk.ctx == ctx {
                (desk.known, desk.changes) = (known(s), changes);
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
        let magazine =
            |&size: &usize| Magazine { count: 0, capacity: (BYTES / size).clamp(2, BLOCKS) as u32, size: size as u64 };
        let magazines: Box<[Magazine]> = pool.bin_sizes().iter().map(magazine).collect();
        let desk = Desk {
            known: known(s),
            changes,
            expected: entry::expected(pool.space_id()),
            bins: pool.bins_by_granules(),
            ready: std::iter::repeat_n(Ready { addr: 0, cell: &NOTHING }, magazines.len() * BLOCKS).collect(),
            magazines,
            counters,
            limit: limit(pool),
            handle: s.0,
            ctx,
            key,
            driver: pool.driver(),
            space: pool.space_id(),
            pool: pool.clone(),
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

/// What a place holds that was never used.
static NOTHING: AtomicU64 = AtomicU64::new(0);

/// `Desk::known` of a stream that was just verified.
fn known(s: Stream) -> usize {
    if pool::deaths_are_seen() && !is_implicit(s) { s.0 } else { ASK }
}

fn limit(pool: &Pool) -> u64 {
    (pool.peak_live() / SHARE).clamp(SHARE_BOUNDS.0, SHARE_BOUNDS.1).min(pool.max_cached())
}

/// This thread's magazines, made at first use. None while the thread ends, and where the system has no barrier to keep a thread out of
/// them that costs it nothing.
fn local() -> Option<&'static Local> {
    if let Some(local) = here() {
        return Some(local);
    }
    if !Barrier::is_there() {
        return None;
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
