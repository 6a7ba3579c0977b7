//! The pool of one CUDA context.
//!
//! # The contract
//! 1. `malloc(size, S)` returns memory that work submitted to stream S from now on may use at once. 512-byte aligned or
//!    better.
//! 2. `free(p, S)` means: S is the last stream to use p. Later work on S may reuse p at once, with no event and no wait.
//!    Another stream gets it only after the work on S that came before the free is done.
//! 3. `record_stream(p, T)`: p is also in use on T; a free then waits for T's work so far as well.
//! 4. Neither call blocks on the GPU while memory can be had without blocking. The order of supply: own stream's bin; own
//!    stream's free space; finished memory of other streams; new memory; and when the driver has none left: idle pages
//!    given back and taken anew at the size that is asked; a host wait for pending work; an error that says what is held.
//! 5. Nothing is remapped, moved or returned while a block in it is live.
//! 6. A pointer that is not a live block's start is `UnknownPointer`, and nothing changes.
//!
//! # The caching policy
//! Modeled on CUB's caching allocator. Requests up to `GPUPOOL_BIN_MAX` are *binned*: rounded up to a geometric bin
//! (`bins.rs`), and when freed kept whole in the bin of the stream that freed them, most recent first. Larger requests are
//! *exact*: rounded to 512 bytes and returned to coalescing free space at once. The two kinds live in segments of their own,
//! so that small blocks do not pin large ones. Bins give their blocks to the free space when they hold more than their
//! share (`GPUPOOL_MAX_CACHED`, else a quarter of the live peak), when the free space cannot fit a request, and when memory
//! is short.
//!
//! Streams are told apart by id, never by handle: a destroyed stream's handle comes back for the next stream created, while
//! the old work may still run. A stream being captured has no id that can be asked for; it counts as a stream of its own, by
//! the capture's id, and what is freed there stays with that capture: the graph's launches will use it again.
//!
//! # Locks
//! One mutex a pool guards the bookkeeping; it is never held across a driver call. Ranks, outermost first: registry, pool,
//! fence events.

pub mod bins;
pub mod fence;
pub mod space;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::config::Config;
use crate::driver::{Context, CurrentContext, DevicePtr, Driver, RelaxedCapture, Stream};
use crate::error::Error;
use crate::source::{Segment, Source, SourceKind};
use bins::BinTable;
use fence::Fences;
use space::{BlockId, GRANULE, OwnerId, Space, round_up};

const MIB: usize = 1 << 20;
/// Segments grow with the pool, between these, so that a small program holds little and a large one makes few driver calls.
/// A larger request gets a segment of its own.
const SEGMENT: (usize, usize) = (2 * MIB, 32 * MIB);
/// Bins may always hold this much, however small the live peak.
const CACHED_FLOOR: usize = 16 * MIB;
/// With this many events not yet done, another one says nothing new.
const MAX_PENDING: usize = 16;
/// Set in the key of a stream that is being captured.
const CAPTURE: u64 = 1 << 62;
/// The stamp of memory freed in a capture: it never finishes, for the graph may be launched again.
const NEVER: u64 = u64::MAX;
/// How often an allocation that the driver refuses is tried again while other threads give memory back.
const RETRIES: usize = 64;

/// Which kind of segment a block lives in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Domain {
    Binned = 0,
    Exact = 1,
}

/// A request after rounding. `size` is in bytes, a multiple of 512.
#[derive(Clone, Copy)]
struct Request {
    size: usize,
    domain: Domain,
    bin: usize,
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
    /// Kept whole in bins.
    pub cached: u64,
    pub mallocs: u64,
    pub frees: u64,
    /// Mallocs served by a bin.
    pub hits: u64,
    /// Events recorded to learn what has finished.
    pub fences: u64,
    /// Times the host waited for the device.
    pub waits: u64,
}

pub struct Pool {
    driver: &'static Driver,
    ctx: Context,
    ctx_id: u64,
    source: Arc<dyn Source>,
    fences: Fences,
    bins: BinTable,
    max_cached: Option<usize>,
    inner: Mutex<Inner>,
    /// Segments on their way back to the driver: memory that is about to be free again.
    releasing: AtomicUsize,
}

struct Inner {
    space: Space,
    streams: HashMap<u64, StreamState>,
    /// Finished memory that belongs to no stream, by domain.
    idle: [OwnerId; 2],
    /// Freed, but in use on streams that nobody can wait for but a fence (`record_stream`), by domain.
    parked: [OwnerId; 2],
    /// The domain of every owner, by owner id.
    domains: Vec<Domain>,
    segments: BTreeMap<u64, (Segment, Domain)>,
    /// Live blocks that are also in use on other streams: the keys of those streams.
    recorded: HashMap<BlockId, Vec<u64>>,
    /// The finished epoch that the last sweep saw.
    swept: u64,
    stats: PoolStats,
    /// Bytes held, by domain.
    held_by: [usize; 2],
}

struct StreamState {
    owners: [OwnerId; 2],
    bins: Vec<Vec<BlockId>>,
}

impl Pool {
    pub fn new(driver: &'static Driver, ctx: Context, ctx_id: u64, source: Arc<dyn Source>, config: &Config) -> Pool {
        let mut space = Space::new();
        let mut domains = Vec::new();
        let mut pair = || {
            [Domain::Binned, Domain::Exact].map(|domain| {
                let o = space.add_owner();
                domains.push(domain);
                o
            })
        };
        let (idle, parked) = (pair(), pair());
        let inner = Inner {
            space,
            streams: HashMap::new(),
            idle,
            parked,
            domains,
            segments: BTreeMap::new(),
            recorded: HashMap::new(),
            swept: 0,
            stats: PoolStats::default(),
            held_by: [0; 2],
        };
        Pool {
            driver,
            ctx,
            ctx_id,
            source,
            fences: Fences::new(driver, ctx),
            bins: BinTable::new(config.bin_growth, config.bin_steps, config.bin_min, config.bin_max),
            max_cached: config.max_cached,
            inner: Mutex::new(inner),
            releasing: AtomicUsize::new(0),
        }
    }

    pub fn ctx_id(&self) -> u64 {
        self.ctx_id
    }

    // ---- malloc ----

    /// Memory for work submitted to `s` from now on. `size` in bytes; 0 is `InvalidArgument`: doors decide what 0 means.
    pub fn malloc(&self, size: usize, s: Stream) -> Result<DevicePtr, Error> {
        let want = self.request(size)?;
        let key = self.stream_key(s)?;
        {
            let mut inner = self.inner.lock();
            let stream = inner.stream(key, self.bins.len());
            if let Some(p) = inner.take_cached(key, want).or_else(|| inner.take_free(stream, want)) {
                return Ok(p);
            }
        }
        self.malloc_slow(want, key, s)
    }

    fn request(&self, size: usize) -> Result<Request, Error> {
        if size == 0 {
            return Err(Error::InvalidArgument);
        }
        if let Some((bin, size)) = self.bins.fit(size) {
            return Ok(Request { size, domain: Domain::Binned, bin });
        }
        let size = round_up(size).ok_or(Error::OutOfMemory { asked: size, detail: None })?;
        Ok(Request { size, domain: Domain::Exact, bin: 0 })
    }

    /// The rest of the order of supply, from finished memory of other streams on.
    #[cold]
    #[inline(never)]
    fn malloc_slow(&self, want: Request, key: u64, s: Stream) -> Result<DevicePtr, Error> {
        let _ctx = CurrentContext::enter(self.driver, self.ctx)?;
        let _relaxed = RelaxedCapture::enter(self.driver);
        let fenced = !self.capturing(s);
        if let Some(p) = self.take_finished(want, key, fenced) {
            return Ok(p);
        }
        match self.grow(want, key, self.segment_size(want)) {
            Err(Error::OutOfMemory { .. }) => {}
            other => return other,
        }
        // The driver has no more. Others may be giving back or taking at the same moment: try for as long as that changes
        // anything.
        for _ in 0..RETRIES {
            if let Some(p) = self.take_anything(want, key) {
                return Ok(p);
            }
            let released = self.release_idle(0)?;
            match self.grow(want, key, want.size) {
                Err(Error::OutOfMemory { .. }) => {}
                other => return other,
            }
            if released > 0 {
                continue;
            }
            if self.releasing.load(Ordering::Acquire) > 0 {
                std::thread::sleep(Duration::from_micros(50));
                continue;
            }
            if !fenced || !self.wait_for_pending() {
                break;
            }
        }
        Err(self.out_of_memory(want.size))
    }

    /// Memory that other streams freed and whose work has finished. Never waits.
    fn take_finished(&self, want: Request, key: u64, fenced: bool) -> Option<DevicePtr> {
        {
            let mut inner = self.inner.lock();
            inner.flush_share(key, want);
            let stream = inner.stream(key, self.bins.len());
            let idle = inner.idle;
            if let Some(p) = inner.take_free(stream, want).or_else(|| inner.take_free(idle, want)) {
                return Some(p);
            }
            if inner.elsewhere(key, want.domain) < want.size {
                return None;
            }
        }
        // Errors here mean that nothing can be learned now; new memory is next in line all the same.
        let _ = self.fences.poll();
        if let Some(p) = self.sweep_and_take(want, key) {
            return Some(p);
        }
        if fenced
            && self.fences.pending() < MAX_PENDING
            && self.fences.close().and_then(|()| self.fences.poll()).is_ok()
        {
            return self.sweep_and_take(want, key);
        }
        None
    }

    fn sweep_and_take(&self, want: Request, key: u64) -> Option<DevicePtr> {
        let mut inner = self.inner.lock();
        inner.sweep(&self.fences, Some(key), want.size);
        let idle = inner.idle;
        inner.take_free(idle, want)
    }

    /// A new segment of `bytes`, or a little more, and the block out of it.
    fn grow(&self, want: Request, key: u64, bytes: usize) -> Result<DevicePtr, Error> {
        let segment = self.source.acquire(bytes)?;
        let (base, size) = (segment.base, segment.size);
        let mut inner = self.inner.lock();
        let stream = inner.stream(key, self.bins.len());
        inner.space.add_region(base, size, stream[want.domain as usize]);
        inner.segments.insert(base, (segment, want.domain));
        inner.held(want.domain, size as isize);
        // The new region fits the request, whatever else the stream's free space holds.
        inner.take_free(stream, want).ok_or(Error::OutOfMemory { asked: want.size, detail: None })
    }

    /// Everything that is finished, of either domain, coalesced.
    fn take_anything(&self, want: Request, key: u64) -> Option<DevicePtr> {
        let _ = self.fences.poll();
        let mut inner = self.inner.lock();
        inner.flush_all();
        inner.sweep(&self.fences, None, 0);
        let stream = inner.stream(key, self.bins.len());
        let other = match want.domain {
            Domain::Binned => Request { domain: Domain::Exact, ..want },
            Domain::Exact => Request { domain: Domain::Binned, ..want },
        };
        let idle = inner.idle;
        [want, other].into_iter().find_map(|w| inner.take_free(stream, w).or_else(|| inner.take_free(idle, w)))
    }

    /// Blocks the host until all memory freed so far is finished. False when there was nothing to wait for, or no way to.
    fn wait_for_pending(&self) -> bool {
        let latest = self.inner.lock().latest_unfinished(&self.fences);
        let Some(stamp) = latest else { return false };
        self.fences.wait(stamp).inspect_err(|e| log::warn!("waiting for freed memory failed: {e:?}")).is_ok()
    }

    fn segment_size(&self, want: Request) -> usize {
        let held = self.inner.lock().held_by[want.domain as usize];
        (held / 8).clamp(SEGMENT.0, SEGMENT.1).max(want.size).next_multiple_of(GRANULE)
    }

    #[cold]
    fn out_of_memory(&self, asked: usize) -> Error {
        let stats = self.stats();
        let largest = {
            let inner = self.inner.lock();
            inner.owners().map(|o| inner.space.largest_free(o)).max().unwrap_or(0)
        };
        let device = CurrentContext::enter(self.driver, self.ctx).and_then(|_ctx| self.driver.mem_info());
        let (free, total) = device.unwrap_or((0, 0));
        let detail = format!(
            "the pool holds {} MiB, of which {} MiB are live and {} MiB idle (largest free block {} MiB); the device has {} of {} MiB free",
            stats.held >> 20,
            stats.live >> 20,
            (stats.held - stats.live) >> 20,
            largest >> 20,
            free >> 20,
            total >> 20
        );
        log::warn!("out of memory: {asked} bytes asked; {detail}");
        Error::OutOfMemory { asked, detail: Some(detail.into()) }
    }

    // ---- free ----

    /// `s` is the last stream that used `p`. `UnknownPointer` for anything but the start of a live block.
    pub fn free(&self, p: DevicePtr, s: Stream) -> Result<(), Error> {
        // Foreign pointers must cost no stream look-up: their stream may be anything.
        if self.inner.lock().space.lookup(p).is_none() {
            return Err(Error::UnknownPointer);
        }
        let key = self.stream_key(s)?;
        let mut inner = self.inner.lock();
        let stamp = if key & CAPTURE != 0 { NEVER } else { self.fences.stamp() };
        let (b, size, domain) = inner.freed(p)?;
        if inner.recorded.remove(&b).is_some_and(|users| users.iter().any(|&user| user != key)) {
            let parked = inner.parked[domain as usize];
            inner.space.free(b, parked, stamp);
            return Ok(());
        }
        let owner = inner.stream(key, self.bins.len())[domain as usize];
        let share = self.max_cached.unwrap_or(CACHED_FLOOR.max(inner.stats.peak_live as usize / 4));
        match self.bins.exact(size) {
            Some(bin) if domain == Domain::Binned && inner.stats.cached as usize + size <= share => {
                inner.space.cache(b, owner, stamp);
                inner.stats.cached += size as u64;
                inner.streams.get_mut(&key).expect("the stream was just looked up").bins[bin].push(b);
            }
            _ => {
                inner.space.free(b, owner, stamp);
            }
        }
        Ok(())
    }

    /// A free that names no stream: anybody gets the memory only after all work submitted to the context so far.
    pub fn free_everywhere(&self, p: DevicePtr) -> Result<(), Error> {
        let mut inner = self.inner.lock();
        let stamp = self.fences.stamp();
        let (b, _, domain) = inner.freed(p)?;
        inner.recorded.remove(&b);
        let parked = inner.parked[domain as usize];
        inner.space.free(b, parked, stamp);
        Ok(())
    }

    /// `p` is in use on `s` too: its free waits for the work that `s` has by then.
    pub fn record_stream(&self, p: DevicePtr, s: Stream) -> Result<(), Error> {
        let key = self.stream_key(s)?;
        let mut inner = self.inner.lock();
        let b = inner.space.lookup(p).ok_or(Error::UnknownPointer)?;
        let users = inner.recorded.entry(b).or_default();
        if !users.contains(&key) {
            users.push(key);
        }
        Ok(())
    }

    // ---- giving back ----

    /// Gives idle memory back to the driver until at most `keep` bytes are held; memory whose work is not finished stays.
    /// Waits for the device only where the driver has no other way to tell what has finished (before CUDA 12.5). Returns the
    /// bytes given back.
    pub fn trim(&self, keep: usize) -> Result<usize, Error> {
        let _ctx = CurrentContext::enter(self.driver, self.ctx)?;
        if !self.capturing(Stream::LEGACY) {
            let settled =
                if self.driver.has_ctx_fences() { self.fences.close() } else { self.fences.wait(self.fences.stamp()) };
            // An error means that less is known to be finished, and less goes back.
            settled.unwrap_or_else(|e| log::debug!("trim: {e:?}"));
        }
        self.release_idle(keep)
    }

    fn release_idle(&self, keep: usize) -> Result<usize, Error> {
        let _ctx = CurrentContext::enter(self.driver, self.ctx)?;
        let _relaxed = RelaxedCapture::enter(self.driver);
        let _ = self.fences.poll();
        let (segments, bytes) = {
            let mut inner = self.inner.lock();
            inner.flush_all();
            let taken = inner.take_idle_pages(&self.fences, keep);
            self.releasing.fetch_add(taken.len(), Ordering::AcqRel);
            let bytes = taken.iter().map(|s| s.size).sum();
            (taken, bytes)
        };
        let mut first = Ok(());
        for segment in segments {
            let released = self.source.release(segment);
            self.releasing.fetch_sub(1, Ordering::AcqRel);
            first = first.and(released);
        }
        first?;
        Ok(bytes)
    }

    /// The context died: everything is forgotten. Pages do not belong to a context and are given back; `cuMemAlloc`'s memory
    /// went with its context, and its addresses may be somebody else's by now.
    pub fn abandon(&self) {
        self.fences.drop_all();
        let segments = {
            let mut inner = self.inner.lock();
            let segments = std::mem::take(&mut inner.segments);
            for (segment, domain) in segments.values() {
                inner.space.forget_region(segment.base, segment.size);
                inner.held(*domain, -(segment.size as isize));
            }
            inner.streams.clear();
            inner.recorded.clear();
            inner.stats.live = 0;
            inner.stats.cached = 0;
            segments
        };
        if self.source.kind() == SourceKind::Vmm {
            for (segment, _) in segments.into_values() {
                if let Err(e) = self.source.release(segment) {
                    log::debug!("a segment of a dead context could not be given back: {e:?}");
                }
            }
        }
    }

    // ---- questions ----

    pub fn stats(&self) -> PoolStats {
        let mut stats = self.inner.lock().stats;
        (stats.fences, stats.waits) = self.fences.counts();
        stats
    }

    /// Bytes that are idle, and the largest block that can be had without the driver.
    pub fn idle(&self) -> (usize, usize) {
        let inner = self.inner.lock();
        let largest = inner.owners().map(|o| inner.space.largest_free(o)).max().unwrap_or(0);
        ((inner.stats.held - inner.stats.live) as usize, largest)
    }

    /// Walks the invariants. Err says which does not hold.
    #[cfg(test)]
    pub fn check(&self) -> Result<(), String> {
        self.inner.lock().check()
    }

    /// Ids tell streams apart; handles come back. NULL and the legacy handle are one stream; the per-thread handle is another
    /// in every thread.
    fn stream_key(&self, s: Stream) -> Result<u64, Error> {
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
        open(s) || (s != Stream::LEGACY && open(Stream::LEGACY))
    }
}

/// A small number that no other living thread has.
fn thread_key() -> u64 {
    thread_local!(static KEY: u8 = const { 0 });
    KEY.with(|k| std::ptr::from_ref(k) as u64)
}

impl Inner {
    /// The owners of stream `key`, made at first use.
    fn stream(&mut self, key: u64, bins: usize) -> [OwnerId; 2] {
        if let Some(state) = self.streams.get(&key) {
            return state.owners;
        }
        let owners = [Domain::Binned, Domain::Exact].map(|domain| {
            let o = self.space.add_owner();
            self.domains.resize(self.domains.len().max(o as usize + 1), domain);
            self.domains[o as usize] = domain;
            o
        });
        self.streams.insert(key, StreamState { owners, bins: vec![Vec::new(); bins] });
        owners
    }

    fn owners(&self) -> impl Iterator<Item = OwnerId> {
        self.streams.values().flat_map(|s| s.owners).chain(self.idle).chain(self.parked)
    }

    /// A block out of the stream's own bin.
    fn take_cached(&mut self, key: u64, want: Request) -> Option<DevicePtr> {
        if want.domain != Domain::Binned {
            return None;
        }
        let stream = self.streams.get_mut(&key)?;
        let b = stream.bins[want.bin].pop()?;
        let owner = stream.owners[Domain::Binned as usize];
        self.space.uncache(b, owner);
        self.stats.cached -= want.size as u64;
        self.stats.hits += 1;
        Some(self.served(b))
    }

    /// A block out of free space.
    fn take_free(&mut self, owners: [OwnerId; 2], want: Request) -> Option<DevicePtr> {
        let b = self.space.alloc(owners[want.domain as usize], want.size)?;
        Some(self.served(b))
    }

    /// The live block at `p` leaves the books of what is live.
    fn freed(&mut self, p: DevicePtr) -> Result<(BlockId, usize, Domain), Error> {
        let b = self.space.lookup(p).ok_or(Error::UnknownPointer)?;
        let size = self.space.size(b);
        let domain = self.domains[self.space.owner(b) as usize];
        self.stats.live -= size as u64;
        self.stats.frees += 1;
        Ok((b, size, domain))
    }

    fn served(&mut self, b: BlockId) -> DevicePtr {
        let stats = &mut self.stats;
        stats.live += self.space.size(b) as u64;
        stats.peak_live = stats.peak_live.max(stats.live);
        stats.mallocs += 1;
        self.space.addr(b)
    }

    fn held(&mut self, domain: Domain, change: isize) {
        self.stats.held = self.stats.held.wrapping_add_signed(change as i64);
        self.stats.peak_held = self.stats.peak_held.max(self.stats.held);
        let by = &mut self.held_by[domain as usize];
        *by = by.wrapping_add_signed(change);
    }

    /// Free bytes of `domain` that belong to other streams, or to none yet.
    fn elsewhere(&self, key: u64, domain: Domain) -> usize {
        let others = self.streams.iter().filter(|(k, _)| **k != key).map(|(_, s)| s.owners);
        others
            .chain([self.parked])
            .map(|o| self.space.free_bytes(o[domain as usize]) + self.space.cached_bytes(o[domain as usize]))
            .sum()
    }

    /// Bins that hold far more than is asked give their blocks to the free space before new memory is taken.
    fn flush_share(&mut self, key: u64, want: Request) {
        let Some(stream) = self.streams.get(&key) else {
            return;
        };
        let cached = self.space.cached_bytes(stream.owners[Domain::Binned as usize]);
        if want.domain == Domain::Binned
            && cached >= 4 * want.size
            && cached >= self.held_by[Domain::Binned as usize] / 4
        {
            self.flush(key);
        }
    }

    fn flush(&mut self, key: u64) {
        let Some(stream) = self.streams.get_mut(&key) else {
            return;
        };
        for b in stream.bins.iter_mut().flat_map(std::mem::take) {
            self.stats.cached -= self.space.size(b) as u64;
            let stamp = self.space.stamp(b);
            self.space.free(b, stream.owners[Domain::Binned as usize], stamp);
        }
    }

    fn flush_all(&mut self) {
        let keys: Vec<u64> = self.streams.keys().copied().collect();
        for key in keys {
            self.flush(key);
        }
    }

    /// Moves finished memory of every stream but `except` to the idle owners, and forgets streams that own nothing. Bins that
    /// hold less than `worth` bytes keep their blocks: they could not serve the request.
    fn sweep(&mut self, fences: &Fences, except: Option<u64>, worth: usize) {
        let finished = fences.finished();
        if finished == self.swept && except.is_some() {
            return;
        }
        self.swept = finished;
        let keys: Vec<u64> = self.streams.keys().copied().filter(|k| Some(*k) != except).collect();
        for key in keys {
            let owners = self.streams[&key].owners;
            if self.space.cached_bytes(owners[Domain::Binned as usize]) >= worth {
                self.flush(key);
            }
            self.sweep_owners(owners, fences);
            if owners.iter().all(|&o| self.space.owns_nothing(o)) {
                owners.iter().for_each(|&o| self.space.remove_owner(o));
                self.streams.remove(&key);
            }
        }
        self.sweep_owners(self.parked, fences);
    }

    fn sweep_owners(&mut self, owners: [OwnerId; 2], fences: &Fences) {
        for (from, to) in owners.into_iter().zip(self.idle) {
            for b in self.space.free_blocks(from) {
                // Blocks of `from` never merge while they leave it, so the ids stay good.
                if fences.is_finished(self.space.stamp(b)) {
                    self.space.set_owner(b, to);
                }
            }
        }
    }

    /// The latest stamp of free memory that is not finished.
    fn latest_unfinished(&self, fences: &Fences) -> Option<u64> {
        let blocks = self.owners().flat_map(|o| self.space.free_blocks(o));
        blocks.map(|b| self.space.stamp(b)).filter(|&s| !fences.is_finished(s)).max()
    }

    /// Takes wholly free, finished pages out of the books until at most `keep` bytes are held. What a segment has left stays
    /// in use.
    fn take_idle_pages(&mut self, fences: &Fences, keep: usize) -> Vec<Segment> {
        let mut out = Vec::new();
        let bases: Vec<u64> = self.segments.keys().copied().collect();
        for base in bases {
            let free: Vec<_> =
                self.space.free_runs(base).into_iter().filter(|&(_, _, stamp)| fences.is_finished(stamp)).collect();
            if free.is_empty() {
                continue;
            }
            let (segment, domain) = self.segments.remove(&base).expect("the base was just listed");
            let mut excess = (self.stats.held as usize).saturating_sub(keep);
            let taken: Vec<bool> = segment
                .pages()
                .map(|(page, size)| {
                    let idle = free.iter().any(|&(from, to, _)| from <= page && page + size as u64 <= to);
                    let take = idle && excess > 0;
                    excess -= if take { size.min(excess) } else { 0 };
                    take
                })
                .collect();
            for (take, part) in segment.split(&taken) {
                if take {
                    self.space.remove_region(part.base, part.size).expect("the pages are idle");
                    self.held(domain, -(part.size as isize));
                    out.push(part);
                } else {
                    self.segments.insert(part.base, (part, domain));
                }
            }
        }
        out
    }

    #[cfg(test)]
    fn check(&self) -> Result<(), String> {
        self.space.check()?;
        let (mut live, mut cached) = (0, 0);
        for o in self.owners() {
            live += self.space.live_bytes(o) as u64;
            cached += self.space.cached_bytes(o) as u64;
        }
        let binned: usize =
            self.streams.values().flat_map(|s| s.bins.iter().flatten()).map(|&b| self.space.size(b)).sum();
        let held: usize = self.segments.values().map(|(s, _)| s.size).sum();
        let stats = &self.stats;
        if (live, cached, held as u64) != (stats.live, stats.cached, stats.held) || binned as u64 != cached {
            return Err(format!(
                "live {live}, cached {cached} (in bins {binned}), held {held}; the books say {stats:?}"
            ));
        }
        if self.space.total() != held {
            return Err(format!("regions of {} bytes in segments of {held}", self.space.total()));
        }
        if let Some(b) = self.recorded.keys().find(|&&b| self.space.lookup(self.space.addr(b)) != Some(b)) {
            return Err(format!("block {b} is recorded on a stream but not live"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
