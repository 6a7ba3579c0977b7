//! The pool of one CUDA context.
//!
//! # The contract
//! 1. `malloc(size, S)` returns memory that work submitted to stream S from now on may use at once. 512-byte aligned or
//!    better.
//! 2. `free(p, S)` means: S is the last stream to use p. Later work on S may reuse p at once, with no event and no wait.
//!    Another stream gets it only after the work on S that came before the free is done.
//! 3. `record_stream(p, T)`: p is also in use on T; a free then waits for T's work so far as well.
//! 4. A free that names no stream (`free_everyone`: cudaFree, cuMemFree) counts as ordered after everything submitted to the
//!    context so far, on every stream, as the real one is by waiting for the device. Here the host does not wait: the order is
//!    kept on the device (`fence.rs`), unless `GPUPOOL_FREE=sync` asks for the wait.
//! 5. Neither call blocks on the GPU while memory can be had without blocking. The order of supply: own stream's bin; own
//!    stream's free space; what any stream may have; finished memory of other streams; new memory within the slack; wholly free
//!    pages moved to where they are needed; new memory up to the limit; a host wait for pending work; an error that says what is held.
//! 6. Out of memory is only ever: asked + the pages that hold a live block > limit.
//! 7. Nothing is remapped, moved or returned while a block in it is live.
//! 8. A pointer that is not a live block's start is `UnknownPointer`, and nothing changes.
//!
//! # The caching policy
//! Modeled on CUB's caching allocator. Requests up to `GPUPOOL_BIN_MAX` are *binned*: rounded up to a geometric bin
//! (`bins.rs`), and when freed kept whole in the bin of the stream that freed them, most recent first. Larger requests are
//! *exact*: rounded to 512 bytes and returned to coalescing free space at once. Blocks under 4 KiB, binned and large ones live in
//! arenas of their own, so that small blocks do not pin large pages. Bins give their blocks to the free space when they hold more
//! than their share (`GPUPOOL_MAX_CACHED`, else a quarter of the live peak), when the free space cannot fit a request, and when
//! memory is short. In front of the bins every thread keeps magazines (`cache.rs`).
//!
//! Streams are told apart by id, never by handle: a destroyed stream's handle comes back for the next stream created, while
//! the old work may still run. A stream being captured has no id that can be asked for; it counts as a stream of its own, by
//! the capture's id, and what is freed there stays with that capture: the graph's launches will use it again.
//!
//! # Locks
//! One mutex a pool guards the bookkeeping; it is never held across a driver call. Ranks, outermost first: registry, a thread's
//! magazines, pool, table, fence events.

pub mod bins;
pub mod fence;
mod inner;
mod pages;
pub mod space;
pub mod table;
mod window;

pub use pages::wait_for_growth;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::config::{Config, FreeMode};
use crate::driver::{Context, CurrentContext, DevicePtr, Driver, Stream};
use crate::error::Error;
use crate::source::{Arena, Source, SourceKind};
use bins::BinTable;
use fence::Fences;
pub use inner::EXPORTED;
use inner::{CAPTURED, Inner};
use space::{BlockId, Space, round_up};

const MIB: usize = 1 << 20;
/// Blocks from here on lie 4 KiB apart and more, so that the table over their addresses can be coarse.
const TINY: usize = 4096;
/// Bins may always hold this much, however small the live peak.
const CACHED_FLOOR: usize = 32 * MIB;
/// With this many events not yet done, another one says nothing new.
const MAX_PENDING: usize = 16;
/// A bar is due when this many frees without a stream wait for one, or when they hold this share of the live peak (a barrier every 64
/// launches costs a launch-bound program 0.14 us a launch on an H200, one every 16 launches 0.5).
const BATCH: usize = 32;
const BATCH_SHARE: u64 = 32;
const BATCH_FLOOR: usize = 8 * MIB;
/// Set in the key of a stream that is being captured.
const CAPTURE: u64 = 1 << 62;
/// The stamp of memory freed in a capture: it never finishes, for the graph may be launched again.
const NEVER: u64 = u64::MAX;

/// A request after rounding. `size` is in bytes, a multiple of 512.
#[derive(Clone, Copy)]
pub struct Request {
    pub size: usize,
    pub arena: Arena,
    /// None: exact.
    pub bin: Option<usize>,
}

/// Who asks for memory.
#[derive(Clone, Copy)]
pub enum User {
    /// Work on one stream: its key, and the handle.
    Stream(u64, Stream),
    /// Work on any stream of the context, which nobody named.
    Everyone,
}

/// Pools that have frees waiting for a bar.
static OPEN_POOLS: AtomicUsize = AtomicUsize::new(0);
/// Whether the doors see streams and contexts die, and captures begin and end.
static DEATHS_ARE_SEEN: AtomicBool = AtomicBool::new(false);

/// Whether any pool has frees waiting for a bar.
#[inline]
pub fn any_open() -> bool {
    OPEN_POOLS.load(Ordering::Acquire) > 0
}

/// The doors see, from now on, streams and contexts die, and captures begin and end.
#[cfg_attr(test, allow(dead_code))]
pub fn see_deaths() {
    DEATHS_ARE_SEEN.store(true, Ordering::Release);
}

#[inline]
pub fn deaths_are_seen() -> bool {
    DEATHS_ARE_SEEN.load(Ordering::Relaxed)
}

/// What the pool holds, in bytes, and what it did.
#[derive(Clone, Copy, Default, Debug)]
pub struct PoolStats {
    /// In blocks the program holds, rounding included.
    pub live: u64,
    pub peak_live: u64,
    /// Taken from the driver.
    pub held: u64,
    pub peak_held: u64,
    /// Kept whole in bins and magazines.
    pub cached: u64,
    pub mallocs: u64,
    pub frees: u64,
    /// Mallocs served by a bin or a magazine.
    pub hits: u64,
    /// Events recorded to learn what has finished.
    pub fences: u64,
    /// Times the host waited for the device.
    pub waits: u64,
    /// Mallocs that took new memory, or moved pages.
    pub grown: u64,
}

/// Ready blocks that somebody above the pool keeps: the magazines of one thread.
pub trait Magazines: Send + Sync {
    /// Adds what they hold and did of this pool: cached, mallocs, frees and hits.
    fn count(&self, pool: &Pool, into: &mut PoolStats);
    /// Gives every block of this pool back. Called without a lock of the pool.
    fn drain(&self, pool: &Pool);
}

/// The magazines of every thread that has any.
static MAGAZINES: Mutex<Vec<Weak<dyn Magazines>>> = Mutex::new(Vec::new());

/// Magazines that the pools can reach from now on, for as long as they live.
pub fn attach(magazines: Weak<dyn Magazines>) {
    let mut all = MAGAZINES.lock();
    all.retain(|m| m.strong_count() > 0);
    all.push(magazines);
}

fn all_magazines() -> Vec<Arc<dyn Magazines>> {
    MAGAZINES.lock().iter().filter_map(Weak::upgrade).collect()
}

/// Whether a stream's key is a capture's.
#[inline]
pub fn is_capture(key: u64) -> bool {
    key & CAPTURE != 0 && key >> 63 == 0
}

pub struct Pool {
    driver: &'static Driver,
    ctx: Context,
    ctx_id: u64,
    ordinal: i32,
    primary: bool,
    source: Arc<dyn Source>,
    fences: Fences,
    bins: BinTable,
    max_cached: Option<usize>,
    slack: f64,
    free_mode: FreeMode,
    inner: Mutex<Inner>,
    space_id: u16,
    /// Pages on their way back to the driver: memory that is about to be free again.
    releasing: AtomicUsize,
    /// Pages that went back or moved so far: more may be free than at the last look.
    given_back: AtomicUsize,
    /// Frees that wait for a bar: copies to the host look here.
    open: AtomicUsize,
    /// Contexts of other devices whose kernels may use this memory.
    readers: Mutex<Vec<Context>>,
    /// The context is gone.
    dead: AtomicBool,
}

impl Pool {
    /// A pool over `source` for `ctx`, a context of device `ordinal`, its primary one or not. Out of memory when the process has no room for its tables.
    pub fn new(
        driver: &'static Driver,
        ctx: Context,
        ctx_id: u64,
        (ordinal, primary): (i32, bool),
        source: Arc<dyn Source>,
        config: &Config,
    ) -> Result<Pool, Error> {
        let space = Space::new().ok_or(Error::OutOfMemory { asked: 0, detail: None })?;
        Ok(Pool {
            driver,
            ctx,
            ctx_id,
            ordinal,
            primary,
            fences: Fences::new(driver, ctx),
            bins: BinTable::new(config.bin_growth, config.bin_steps, config.bin_min, config.bin_max),
            max_cached: config.max_cached,
            slack: config.slack,
            free_mode: config.free,
            space_id: space.id(),
            inner: Mutex::new(Inner::new(space, source.kind() != SourceKind::Vmm)),
            releasing: AtomicUsize::new(0),
            given_back: AtomicUsize::new(0),
            open: AtomicUsize::new(0),
            readers: Mutex::default(),
            dead: AtomicBool::new(false),
            source,
        })
    }

    pub fn ctx(&self) -> Context {
        self.ctx
    }
    /// Unique for the life of the process.
    pub fn ctx_id(&self) -> u64 {
        self.ctx_id
    }
    pub fn ordinal(&self) -> i32 {
        self.ordinal
    }
    /// Whether it is of the device's primary context, whose handle never dangles.
    pub fn is_primary(&self) -> bool {
        self.primary
    }
    /// What the records of the pool's blocks name as their space.
    pub fn space_id(&self) -> u16 {
        self.space_id
    }

    // ---- malloc ----

    /// Memory for work submitted to `s` from now on. `size` in bytes; 0 is `InvalidArgument`: doors decide what 0 means.
    pub fn malloc(&self, size: usize, s: Stream) -> Result<DevicePtr, Error> {
        let want = self.request(size)?;
        let key = self.stream_key(s)?;
        self.malloc_for(want, User::Stream(key, s))
    }

    /// Memory for work submitted to any stream of the context from now on.
    pub fn malloc_everyone(&self, size: usize) -> Result<DevicePtr, Error> {
        // There are no bins for it: to the granule.
        let want = self.request(size)?;
        let want = Request { size: round_up(size).unwrap_or(want.size), bin: None, ..want };
        let block = table::block(self.serve(want, User::Everyone)?);
        let waste = block.size.load(Ordering::Relaxed) - size as u64;
        block.waste.store(waste.try_into().unwrap_or(0), Ordering::Relaxed);
        Ok(block.addr.load(Ordering::Relaxed))
    }

    #[inline]
    pub fn request(&self, size: usize) -> Result<Request, Error> {
        if size == 0 {
            return Err(Error::InvalidArgument);
        }
        if let Some((bin, size)) = self.bins.fit(size) {
            let arena = if size < TINY { Arena::Tiny } else { Arena::Small };
            return Ok(Request { size, arena, bin: Some(bin) });
        }
        // Half of all addresses is far from any device, and leaves room to reckon.
        let rounded = round_up(size).filter(|&size| size <= isize::MAX as usize);
        let size = rounded.ok_or(Error::OutOfMemory { asked: size, detail: None })?;
        // Without bins there are small exact ones.
        let arena = if size < TINY { Arena::Tiny } else { Arena::Large };
        Ok(Request { size, arena, bin: None })
    }

    fn serve(&self, want: Request, user: User) -> Result<BlockId, Error> {
        {
            let mut inner = self.inner.lock();
            let due = matches!(user, User::Everyone) && inner.batch_is_due(want);
            if !due && let Some(b) = inner.take(user, want) {
                self.note_peak(&mut inner);
                return Ok(self.mark_captured(b, user));
            }
        }
        let b = self.serve_slow(want, user)?;
        self.note_peak(&mut self.inner.lock());
        Ok(self.mark_captured(b, user))
    }

    fn mark_captured(&self, b: BlockId, user: User) -> BlockId {
        if matches!(user, User::Stream(key, _) if key & CAPTURE != 0) {
            table::block(b).add_special(CAPTURED);
        }
        b
    }

    /// The live peak, magazines' blocks not counted: they are asked for only when the sum without them would be a new peak.
    fn note_peak(&self, inner: &mut Inner) {
        let upper = inner.space.used_total() as u64 - inner.stats.cached;
        if upper > inner.stats.peak_live || upper > inner.recent_peak[0] {
            let mut there = PoolStats::default();
            all_magazines().iter().for_each(|m| m.count(self, &mut there));
            let live = upper.saturating_sub(there.cached);
            inner.stats.peak_live = inner.stats.peak_live.max(live);
            inner.recent_peak[0] = inner.recent_peak[0].max(live);
        }
    }

    // ---- for magazines ----

    pub fn driver(&self) -> &'static Driver {
        self.driver
    }

    /// The bin of a request; None for one that is not binned.
    #[inline]
    pub fn bin_of(&self, size: usize) -> Option<usize> {
        self.bins.of(size)
    }

    /// Bytes of the blocks of every bin.
    pub fn bin_sizes(&self) -> &[usize] {
        self.bins.sizes()
    }

    /// The bins of sizes that are looked up, by `bins::granules`.
    pub fn bins_by_granules(&self) -> Arc<[u16]> {
        self.bins.index()
    }

    /// What `request` made, served.
    pub fn malloc_for(&self, want: Request, user: User) -> Result<DevicePtr, Error> {
        self.serve(want, user).map(|b| table::block(b).addr.load(Ordering::Relaxed))
    }

    /// Up to `n` blocks out of a bin of stream `key`, cached still.
    pub fn lend(&self, key: u64, bin: usize, n: usize, out: &mut Vec<BlockId>) {
        self.inner.lock().lend(key, bin, n, out);
    }

    /// Cached blocks come back, freed on stream `key` at some time until now.
    pub fn put_back(&self, key: u64, blocks: &[BlockId]) {
        if blocks.is_empty() {
            return;
        }
        let stamp = self.fences.stamp();
        let mut inner = self.inner.lock();
        if self.is_dead() {
            // They were forgotten with all others, and their records may be another pool's by now.
            return;
        }
        for &b in blocks {
            if inner.is_closed(b) {
                // It was freed while its pages were being closed.
                let parked = inner.parked[inner.arena_of(b) as usize];
                let owner = inner.owner_after_free(b, parked, stamp);
                inner.space.free(b, owner, stamp);
                continue;
            }
            let (size, bin) = (inner.space.size(b), table::block(b).bin());
            if bin > 0 && inner.stats.cached as usize + size <= self.cached_share(&inner) {
                inner.cache(b, key, bin - 1, self.bins.len(), stamp);
            } else {
                let arena = inner.arena_of(b) as usize;
                let owner = inner.owners_of(User::Stream(key, Stream::NULL), self.bins.len())[arena];
                inner.space.free(b, owner, stamp);
            }
        }
    }

    /// What magazines that are gone did.
    pub fn note(&self, hits: u64, frees: u64) {
        let stats = &mut self.inner.lock().stats;
        stats.mallocs += hits;
        stats.hits += hits;
        stats.frees += frees;
    }

    pub fn peak_live(&self) -> u64 {
        self.inner.lock().stats.peak_live
    }

    /// `GPUPOOL_MAX_CACHED`, in bytes.
    pub fn max_cached(&self) -> u64 {
        self.max_cached.map_or(u64::MAX, |n| n as u64)
    }

    /// Whether the pool is of the calling thread's current context.
    pub fn is_current(&self) -> bool {
        self.driver.ctx_current() == Ok(Some(self.ctx))
    }

    // ---- free ----

    /// `s` is the last stream that used `p`. `UnknownPointer` for anything but the start of a live block.
    pub fn free(&self, p: DevicePtr, s: Stream) -> Result<(), Error> {
        // Foreign pointers must cost no stream look-up: their stream may be anything.
        self.find(p)?;
        let key = self.stream_key(s)?;
        let mut inner = self.inner.lock();
        let (b, size, arena) = inner.live(p).ok_or(Error::UnknownPointer)?;
        inner.stats.frees += 1;
        let stamp = if key & CAPTURE != 0 { NEVER } else { self.fences.stamp() };
        let elsewhere = inner.was_recorded_elsewhere(b, Some(key));
        if elsewhere || inner.is_closed(b) {
            let owner = {
                let parked = inner.parked[arena as usize];
                inner.owner_after_free(b, parked, stamp)
            };
            inner.space.free(b, owner, stamp);
            return Ok(());
        }
        let block = table::block(b);
        block.clear_special();
        block.waste.store(0, Ordering::Relaxed);
        let bin = block.bin();
        if bin > 0 && inner.stats.cached as usize + size <= self.cached_share(&inner) {
            inner.cache(b, key, bin - 1, self.bins.len(), stamp);
        } else {
            let owner = inner.owners_of(User::Stream(key, s), self.bins.len())[arena as usize];
            inner.space.free(b, owner, stamp);
        }
        Ok(())
    }

    fn cached_share(&self, inner: &Inner) -> usize {
        self.max_cached.unwrap_or(CACHED_FLOOR.max(inner.stats.peak_live as usize / 4))
    }

    /// A free that names no stream: anybody gets the memory only after all work submitted to the context so far.
    pub fn free_everyone(&self, p: DevicePtr) -> Result<(), Error> {
        self.find(p)?;
        let captured = fence::capturing();
        let waits =
            self.free_mode == FreeMode::Sync || !self.driver.has_ctx_fences() || !self.readers.lock().is_empty();
        let stamp = match (captured, waits) {
            // Neither call may be made now; the next one after the capture covers this free too.
            (true, _) => self.fences.stamp(),
            (_, true) => self.settle()?,
            _ => self.fences.mark(),
        };
        {
            let mut inner = self.inner.lock();
            let (b, size, arena) = inner.live(p).ok_or(Error::UnknownPointer)?;
            inner.stats.frees += 1;
            inner.was_recorded_elsewhere(b, None);
            let done = self.fences.is_finished(stamp);
            let to = if done { inner.common } else { inner.parked };
            let owner = inner.owner_after_free(b, to[arena as usize], stamp);
            inner.space.free(b, owner, stamp);
            if !done {
                inner.batch = (inner.batch.0 + 1, inner.batch.1 + size);
                if self.open.swap(inner.batch.0, Ordering::AcqRel) == 0 {
                    OPEN_POOLS.fetch_add(1, Ordering::AcqRel);
                }
            }
        }
        if self.free_mode == FreeMode::Barrier && !captured {
            let _ctx = CurrentContext::enter(self.driver, self.ctx)?;
            self.bar();
        }
        Ok(())
    }

    /// The host waits for everything submitted so far, on other devices that read this memory too. The stamp of what is done then.
    #[cold]
    fn settle(&self) -> Result<u64, Error> {
        let readers = self.readers.lock().clone();
        for ctx in readers {
            // A context that is gone has no work.
            let waited = CurrentContext::enter(self.driver, ctx).and_then(|_ctx| self.driver.ctx_synchronize());
            waited.unwrap_or_else(|e| log::debug!("a peer's context could not be waited for: {e:?}"));
        }
        let _ctx = CurrentContext::enter(self.driver, self.ctx)?;
        let stamp = if self.driver.has_ctx_fences() { self.fences.mark() } else { self.fences.stamp() };
        self.fences.wait(stamp)?;
        Ok(stamp)
    }

    /// All later work of the context waits, on the device, for the frees that named no stream so far; their memory is anybody's then.
    /// The context must be current, and no stream captured.
    fn bar(&self) -> bool {
        let finished_only = {
            let mut inner = self.inner.lock();
            inner.batch = (0, 0);
            if self.open.swap(0, Ordering::AcqRel) > 0 {
                OPEN_POOLS.fetch_sub(1, Ordering::AcqRel);
            }
            inner.finished_only
        };
        if finished_only {
            return false;
        }
        match self.fences.bar() {
            Ok(barred) => barred,
            Err(e) => {
                log::debug!("no barrier could be set: {e:?}");
                false
            }
        }
    }

    /// Before a copy to the host: a program that lets cudaFree be its only synchronisation reads whole results.
    #[inline]
    pub fn before_copy_to_host(&self) {
        if self.open.load(Ordering::Acquire) > 0 && !fence::capturing() {
            self.bar();
        }
    }

    /// `p` is in use on `s` too: its free waits for the work that `s` has by then.
    pub fn record_stream(&self, p: DevicePtr, s: Stream) -> Result<(), Error> {
        let key = self.stream_key(s)?;
        let mut inner = self.inner.lock();
        let (b, ..) = inner.live(p).ok_or(Error::UnknownPointer)?;
        inner.record(b, key);
        Ok(())
    }

    /// The live block of this pool that starts at `p`. Takes no lock.
    #[inline]
    fn find(&self, p: DevicePtr) -> Result<(BlockId, &'static table::Block), Error> {
        table::find(p)
            .filter(|(_, block)| {
                block.space.load(Ordering::Relaxed) == self.space_id && block.state() == table::State::Live
            })
            .ok_or(Error::UnknownPointer)
    }

    // ---- what doors tell ----

    /// Work of `reader`, another device's context, may use this memory from now on: frees wait for it too.
    pub fn open_to(&self, reader: Context) {
        let mut readers = self.readers.lock();
        if !readers.contains(&reader) {
            readers.push(reader);
        }
        drop(readers);
        self.finished_only("another device may use its memory");
    }

    /// From now on memory changes hands only when the work before its free is finished: something uses it that is not on the
    /// context's streams.
    pub fn finished_only(&self, why: &str) {
        if !std::mem::replace(&mut self.inner.lock().finished_only, true) {
            log::info!("device {}: {why}; freed memory waits until its work is finished", self.ordinal);
            // What was ordered so far must be finished before it is handed out.
            let common = self.fences.stamp();
            if let Err(e) = self.fences.wait(common) {
                log::warn!("the work so far could not be waited for: {e:?}");
            }
        }
    }

    // ---- questions ----

    pub fn stats(&self) -> PoolStats {
        let mut there = PoolStats::default();
        all_magazines().iter().for_each(|m| m.count(self, &mut there));
        let inner = self.inner.lock();
        let mut stats = inner.stats;
        stats.cached += there.cached;
        stats.mallocs += there.mallocs;
        stats.frees += there.frees;
        stats.hits += there.hits;
        stats.live = (inner.space.used_total() as u64).saturating_sub(stats.cached);
        stats.peak_live = stats.peak_live.max(stats.live);
        (stats.fences, stats.waits) = self.fences.counts();
        stats
    }

    /// Bytes that are idle, and the largest block that can be had without the driver.
    pub fn idle(&self) -> (usize, usize) {
        let stats = self.stats();
        let inner = self.inner.lock();
        let largest = inner.owners().map(|o| inner.space.largest_free(o)).max().unwrap_or(0);
        ((stats.held - stats.live) as usize, largest)
    }

    /// Bytes that are held and not live.
    pub fn idle_bytes(&self) -> usize {
        let stats = self.stats();
        stats.held.saturating_sub(stats.live) as usize
    }

    /// A stamp for what the context was given so far; None while that cannot be recorded.
    pub fn mark(&self) -> Option<u64> {
        (!fence::capturing()).then(|| self.fences.mark())
    }

    /// Whether what a mark stands for is finished, or its context gone. Never waits.
    pub fn is_done(&self, mark: u64) -> bool {
        if self.is_dead() || self.fences.is_finished(mark) {
            return true;
        }
        if !fence::capturing() {
            let _ = self.fences.seal().and_then(|()| self.fences.poll());
        }
        self.fences.is_finished(mark)
    }

    /// A number that no other block has, nor this one after its free.
    pub fn serial_of(&self, p: DevicePtr) -> u64 {
        let serial =
            self.find(p).map_or(0, |(b, block)| u64::from(b) << 32 | u64::from(block.serial.load(Ordering::Relaxed)));
        // Clear of the driver's own numbers, which count from 1.
        serial | 1 << 63
    }

    /// Start of the live block that holds `p`, which may lie inside it, and the bytes that were asked for.
    pub fn block_of(&self, p: DevicePtr) -> Option<(DevicePtr, usize)> {
        let inner = self.inner.lock();
        let b = inner.space.lookup(p).or_else(|| inner.space.containing(p))?;
        let asked = inner.space.size(b) - table::block(b).waste.load(Ordering::Relaxed) as usize;
        let start = inner.space.addr(b);
        (p < start + asked as u64).then_some((start, asked))
    }

    /// Whether `p` lies in the pool's memory, live or not.
    pub fn holds(&self, p: DevicePtr) -> bool {
        let inner = self.inner.lock();
        let page = |pages: &std::collections::BTreeMap<u64, crate::source::Segment>| {
            pages.range(..=p).next_back().is_some_and(|(&base, page)| p < base + page.size as u64)
        };
        inner.pages.iter().any(page)
    }

    /// Walks the invariants. Err says which does not hold.
    #[cfg(test)]
    pub fn check(&self) -> Result<(), String> {
        self.inner.lock().check()
    }

    /// Ids tell streams apart; handles come back. NULL and the legacy handle are one stream; the per-thread handle is another
    /// in every thread.
    pub fn stream_key(&self, s: Stream) -> Result<u64, Error> {
        if s == Stream::NULL || s == Stream::LEGACY {
            return Ok(0);
        }
        if !self.driver.has_stream_id() {
            // The handle is all there is; the top bit keeps threads' keys clear of handles.
            return Ok(if s == Stream::PER_THREAD { thread_key() | 1 << 63 } else { s.0 as u64 });
        }
        let _ctx = if s == Stream::PER_THREAD { Some(CurrentContext::enter(self.driver, self.ctx)?) } else { None };
        if let Some(capture) = self.driver.capture_id(s)? {
            return Ok(capture | CAPTURE);
        }
        // +1 keeps clear of the legacy key.
        Ok(self.driver.stream_id(s)?.wrapping_add(1))
    }

    /// Whether a stream that can be seen is being captured: a fence would break the capture.
    fn capturing(&self, s: Stream) -> bool {
        // The legacy stream answers 906 while a blocking stream is captured.
        let open = |s| self.driver.stream_is_capturing(s).unwrap_or(true);
        fence::capturing() || open(s) || (s != Stream::LEGACY && open(Stream::LEGACY))
    }
}

/// A small number that no other living thread has.
fn thread_key() -> u64 {
    thread_local!(static KEY: u8 = const { 0 });
    KEY.with(|k| std::ptr::from_ref(k) as u64)
}

#[cfg(test)]
mod tests;
