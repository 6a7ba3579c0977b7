//! The cold half of an allocation, and memory on its way back: fences, growth, pages that move, what was idle for long. Driver calls
//! are made here, with no lock held.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::inner::{CLOSED, EXPORTED, Inner};
use super::space::{BlockId, GRANULE};
use super::table;
use super::window::{self, Hole, Window};
use super::{BATCH, BATCH_FLOOR, BATCH_SHARE, MAX_PENDING, MIB, Pool, Request, SourceKind, TINY, User};
use crate::driver::{CurrentContext, DevicePtr, PageHandle, RelaxedCapture, Stream};
use crate::error::Error;
use crate::source::{Arena, Segment, Shareable};

/// New memory comes in pieces that grow with the pool, between these, so that a small program holds little and a large one makes
/// few driver calls. A larger request gets what it asks for.
const PIECE: (usize, usize) = (2 * MIB, 32 * MIB);
/// A piece is this share of what the arena holds.
const PIECE_SHARE: usize = 128;
/// A page of large blocks is this share of all that is held, of small ones this share of what their arena holds, rounded down to a power
/// of two. (Half as large, and a fifth more pages are made and moved on random sizes up to 512 MiB; twice as large, and a training
/// run whose frees are not finished holds 4 % more.)
const UNIT_SHARE: usize = 32;
const SMALL_UNIT_SHARE: usize = 8;
/// The slack starts at this share of the live peak, and every page that has to be moved (48 us) adds to it, up to `GPUPOOL_SLACK`: a program
/// that asks for the same sizes at each step moves a few pages once, and stays tight; one that never does needs the room.
const SLACK_MIN: f64 = 0.03;
const SLACK_PER_MOVE: f64 = 0.001;
/// Idle memory that never goes back by itself, at least: what the next small program step needs anyway.
const KEPT: usize = 16 * MIB;
/// How often an allocation that the driver refuses is tried again while other threads take what was given back.
const RETRIES: usize = 64;
/// How long it waits, in all, for pages that other threads are giving back: only a thread that hangs in the driver takes longer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Pages for one place.
struct Part {
    /// None: anywhere.
    at: Option<DevicePtr>,
    /// These move there, and new pages of `page` bytes make up for what is lacking to `size`.
    pages: Vec<Segment>,
    size: usize,
    page: usize,
}

/// Some pool took memory since the last look.
static GREW: (Mutex<bool>, Condvar) = (Mutex::new(false), Condvar::new());

/// Blocks until some pool has taken memory since the last call.
pub fn wait_for_growth() {
    let mut grew = GREW.0.lock();
    while !std::mem::replace(&mut *grew, false) {
        GREW.1.wait(&mut grew);
    }
}

fn tell_growth() {
    if !std::mem::replace(&mut *GREW.0.lock(), true) {
        GREW.1.notify_one();
    }
}

impl Inner {
    /// Whether the frees without a stream so far should be barred before memory is taken for `want`.
    pub fn batch_is_due(&self, want: Request) -> bool {
        // Sizes recur: the block that fits exactly is worth a bar, or large blocks end up in each other's gaps (a varying-length training
        // run held 1.08 x its live peak, and 1.035 x with this).
        let exact = |owners: [u32; 3]| self.space.has_exactly(owners[want.arena as usize], want.size);
        if want.arena == Arena::Large && self.batch.0 > 0 && !exact(self.common) && exact(self.parked) {
            return true;
        }
        let share = (self.stats.peak_live / BATCH_SHARE) as usize;
        self.batch.0 >= BATCH || self.batch.1 > share.max(BATCH_FLOOR)
    }
}

impl Pool {
    /// The rest of the order of supply, from finished memory of other streams on.
    #[cold]
    #[inline(never)]
    pub(super) fn serve_slow(&self, want: Request, user: User) -> Result<BlockId, Error> {
        let _ctx = CurrentContext::enter(self.driver, self.ctx)?;
        let _relaxed = RelaxedCapture::enter(self.driver);
        let fenced = match user {
            User::Stream(_, s) => !self.capturing(s),
            User::Everyone => !self.capturing(Stream::LEGACY),
        };
        if let Some(b) = self.take_elsewhere(want, user, fenced) {
            return Ok(b);
        }
        if let Some(b) = self.make_room(want, user, fenced)? {
            return Ok(b);
        }
        let piece = self.piece(want);
        if self.source.kind() != SourceKind::Vmm && !self.within_slack(want, piece) {
            // Whole blocks of the driver's fit few sizes: what has piled up goes back, as CUB's does when its share is full.
            let live = self.stats().live as usize;
            self.release_idle(live + live / 4)?;
        }
        match self.grow(want, user, piece) {
            Err(Error::OutOfMemory { .. }) => {}
            other => return other,
        }
        // The driver, or the limit, has no more. Others may be giving back or taking at the same moment: try for as long as that
        // changes anything.
        self.drain_magazines();
        let began = Instant::now();
        let mut tries = 0;
        while tries < RETRIES {
            let seen = self.given_back.load(Ordering::Acquire);
            if let Some(b) = self.take_anything(want, user) {
                return Ok(b);
            }
            let released = self.release_idle(0)?;
            match self.grow(want, user, want.size) {
                Err(Error::OutOfMemory { .. }) => {}
                other => return other,
            }
            let others =
                || self.releasing.load(Ordering::Acquire) > 0 || self.given_back.load(Ordering::Acquire) != seen;
            if released == 0 && others() && began.elapsed() < PATIENCE {
                // Not a try: on a busy machine the thread that gives back may not have run since the last look.
                std::thread::sleep(Duration::from_micros(50));
                continue;
            }
            tries += 1;
            if released > 0 {
                continue;
            }
            if !fenced || !self.wait_for_pending() {
                break;
            }
        }
        Err(self.out_of_memory(want.size))
    }

    /// Memory that others freed: first what one barrier on the device makes anybody's, then what has finished. Never waits.
    fn take_elsewhere(&self, want: Request, user: User, fenced: bool) -> Option<BlockId> {
        let everyone = matches!(user, User::Everyone);
        let parked = {
            let mut inner = self.inner.lock();
            inner.flush_share(user, want);
            if !(everyone && inner.batch_is_due(want))
                && let Some(b) = inner.take(user, want)
            {
                return Some(b);
            }
            inner.parked_bytes()
        };
        // Who names streams gets no barrier between them: what is finished has to do.
        if fenced
            && everyone
            && parked > 0
            && self.bar()
            && let Some(b) = self.sweep_and_take(want, user)
        {
            return Some(b);
        }
        if self.inner.lock().elsewhere(user) < want.size {
            // A bar that was due and could not be set must not keep ordered memory from being used.
            return self.inner.lock().take(user, want);
        }
        // Errors here mean that nothing can be learned now; new memory is next in line all the same.
        let _ = self.fences.poll();
        if let Some(b) = self.sweep_and_take(want, user) {
            return Some(b);
        }
        if fenced
            && self.fences.pending() < MAX_PENDING
            && self.fences.close().and_then(|()| self.fences.poll()).is_ok()
        {
            return self.sweep_and_take(want, user);
        }
        None
    }

    fn sweep_and_take(&self, want: Request, user: User) -> Option<BlockId> {
        let mut inner = self.inner.lock();
        inner.sweep(&self.fences, Some(user), want.size);
        inner.take(user, want)
    }

    // ---- growth ----

    /// What is taken from the source for `want`, by itself.
    fn piece(&self, want: Request) -> usize {
        let held = self.inner.lock().held_by[want.arena as usize];
        (held / PIECE_SHARE).clamp(PIECE.0, PIECE.1).max(want.size)
    }

    /// New memory of `bytes`, or a little more, and the block out of it.
    fn grow(&self, want: Request, user: User, bytes: usize) -> Result<BlockId, Error> {
        let segment = self.source.acquire(want.arena, bytes)?;
        self.add(segment, want.arena, user)?;
        let mut inner = self.inner.lock();
        let owners = inner.owners_of(user, self.bins.len());
        // Another thread of the same user may have been faster.
        inner.take_free(owners, want).ok_or(Error::OutOfMemory { asked: want.size, detail: None })
    }

    /// The segment becomes free space of `user`.
    fn add(&self, segment: Segment, arena: Arena, user: User) -> Result<(), Error> {
        tell_growth();
        let paged = self.source.kind() == SourceKind::Vmm;
        let refused = {
            let mut inner = self.inner.lock();
            let owner = inner.owners_of(user, self.bins.len())[arena as usize];
            match inner.add_pages(segment, arena, owner, paged) {
                Ok(()) => return Ok(()),
                Err(segment) => segment,
            }
        };
        log::warn!("the tables for blocks are full");
        let asked = refused.size;
        self.source.release(refused)?;
        Err(Error::OutOfMemory { asked, detail: None })
    }

    // ---- where pages go ----

    /// Maps what a request lacks beside free memory, or all of it anywhere: new pages within the slack, else wholly free ones that move.
    /// None when there is not enough of either, or no pages at all.
    fn make_room(&self, want: Request, user: User, fenced: bool) -> Result<Option<BlockId>, Error> {
        if self.source.kind() != SourceKind::Vmm {
            return Ok(None);
        }
        let _ = self.fences.poll();
        if let Some(b) = self.merge_and_take(want, user) {
            return Ok(Some(b));
        }
        let unit = self.unit(want);
        let lacking = self.window(want, user, unit).lacking;
        let grows = self.within_slack(want, lacking);
        if !grows && fenced {
            let _ = self.fences.close();
            let _ = self.fences.poll();
            if let Some(b) = self.merge_and_take(want, user) {
                return Ok(Some(b));
            }
        }
        if !grows {
            self.release_small(user, unit)?;
        }
        let grows = grows || self.within_slack(want, lacking);
        let Some(plan) = self.plan(want, user, unit, !grows) else { return Ok(None) };
        let moving: usize = plan.iter().map(|p| p.pages.len()).sum();
        let mut failed = None;
        for part in plan {
            if failed.is_some() {
                // Nobody waits for these any more.
                for page in part.pages {
                    let released = self.source.release(page);
                    released.unwrap_or_else(|e| log::warn!("a page on its way could not be given back: {e:?}"));
                }
                continue;
            }
            let gathered = self.source.gather(want.arena, part.at, part.pages, part.size, part.page);
            if let Err(e) = gathered.map_err(Error::from).and_then(|segment| self.add(segment, want.arena, user)) {
                failed = Some(e);
            }
        }
        self.left(moving);
        match failed {
            None => {
                let mut inner = self.inner.lock();
                let owners = inner.owners_of(user, self.bins.len());
                Ok(inner.take_free(owners, want))
            }
            Some(Error::OutOfMemory { .. }) => Ok(None),
            Some(e) => Err(e),
        }
    }

    /// Free memory of the stream itself and what is anybody's become one.
    fn merge_and_take(&self, want: Request, user: User) -> Option<BlockId> {
        let mut inner = self.inner.lock();
        inner.sweep(&self.fences, None, usize::MAX);
        inner.give_to_only_stream(user);
        inner.take(user, want)
    }

    /// The size of new pages, which grows with the pool, so that a small program holds little and a large one makes few driver calls.
    fn unit(&self, want: Request) -> usize {
        let inner = self.inner.lock();
        let held = match want.arena {
            Arena::Large => inner.stats.held as usize / UNIT_SHARE,
            small => inner.held_by[small as usize] / SMALL_UNIT_SHARE,
        };
        let most = PIECE.1.min(self.source.page_max());
        1 << held.clamp(PIECE.0.min(most), most).ilog2()
    }

    /// Where the request goes.
    fn window(&self, want: Request, user: User, unit: usize) -> Window {
        let mut inner = self.inner.lock();
        inner.window(want, user, unit, self.bins.len())
    }

    /// Whether the pool may hold `more` bytes before pages are moved.
    fn within_slack(&self, want: Request, more: usize) -> bool {
        let (held, live, moves, idle) = {
            let inner = self.inner.lock();
            let in_use = inner.space.used_total() as u64 - inner.stats.cached + want.size as u64;
            let idle = inner.stats.held.saturating_sub(inner.space.used_total() as u64);
            (inner.stats.held, inner.stats.peak_live.max(in_use), inner.moves, idle)
        };
        let slack = (SLACK_MIN + moves as f64 * SLACK_PER_MOVE).min(self.slack);
        let room = live as f64 * (1.0 + slack);
        // A little that lies idle is not worth a look.
        (held as f64 + more as f64 <= room || idle < KEPT as u64) && !self.short_of_memory(more)
    }

    /// Pages from when the pool was small go back: they would be moved one by one for ever.
    fn release_small(&self, user: User, unit: usize) -> Result<(), Error> {
        let pages = {
            let mut inner = self.inner.lock();
            let owners = inner.reach(user, self.bins.len());
            let mut idle = inner.idle_pages(&self.fences, &owners, &(0..0));
            idle.retain(|p| p.size * 2 < unit);
            let pages = inner.take_pages(idle, &owners);
            self.releasing.fetch_add(pages.len(), Ordering::AcqRel);
            pages
        };
        self.release_pages(pages)
    }

    /// What is to be mapped where. With `moving`, idle pages come first.
    fn plan(&self, want: Request, user: User, unit: usize, moving: bool) -> Option<Vec<Part>> {
        let left = crate::source::budget::of(self.driver, self.ordinal).ok().and_then(|b| b.left());
        let mut inner = self.inner.lock();
        let window = inner.window(want, user, unit, self.bins.len());
        let owner = inner.owners_of(user, self.bins.len())[want.arena as usize];
        let owners = inner.reach(user, self.bins.len());
        inner.own_window(want.arena, owner, &window);
        let around = window
            .holes
            .iter()
            .fold(window.start..window.end, |r, h| r.start.min(h.base)..r.end.max(h.base + h.need as u64));
        let mut idle = if moving { inner.idle_pages(&self.fences, &owners, &around) } else { Vec::new() };
        let (mut left, mut chosen) = (left.unwrap_or(usize::MAX), Vec::new());
        for hole in &window.holes {
            let pages = Inner::choose(&mut idle, hole.need, hole.room, unit);
            let there: usize = pages.iter().map(|p| p.size).sum();
            let new = hole.need.saturating_sub(there);
            // Pages of one size fit each other's holes: with halves too, a third more of them move.
            let whole = new.next_multiple_of(unit).min(hole.room.saturating_sub(there));
            let new = if whole <= left { whole } else { new.next_multiple_of(PIECE.0) };
            left = left.checked_sub(new)?;
            chosen.push((pages, there + new));
        }
        let parts = window.holes.iter().zip(chosen).map(|(hole, (pages, size))| {
            let count: usize = pages.iter().map(|p| p.size).sum();
            let new = size - count;
            let pages = inner.take_pages(pages, &owners);
            inner.moves += pages.len();
            self.releasing.fetch_add(pages.len(), Ordering::AcqRel);
            let there: usize = pages.iter().map(|p| p.size).sum();
            Part { at: (hole.base != 0).then_some(hole.base), size: there + new, pages, page: unit }
        });
        Some(parts.collect())
    }

    /// Everything that is finished, in whatever arena, coalesced.
    fn take_anything(&self, want: Request, user: User) -> Option<BlockId> {
        let _ = self.fences.poll();
        let mut inner = self.inner.lock();
        inner.flush_all();
        inner.sweep(&self.fences, None, 0);
        let owners = inner.owners_of(user, self.bins.len());
        let common = inner.common;
        // In the arenas of larger blocks, blocks lie 4 KiB apart.
        let far = Request { size: want.size.next_multiple_of(TINY), bin: None, ..want };
        let others = [Arena::Large, Arena::Small].into_iter().filter(|&a| a != want.arena);
        let also = others.chain([Arena::Tiny].into_iter().filter(|&a| a != want.arena));
        let tries = std::iter::once(want).chain(also.map(|arena| Request { arena, ..far }));
        tries.into_iter().find_map(|w| inner.take_free(owners, w).or_else(|| inner.take_free(common, w)))
    }

    /// Blocks the host until all memory freed so far is finished. False when there was nothing to wait for, or no way to.
    pub(super) fn wait_for_pending(&self) -> bool {
        let latest = self.inner.lock().latest_unfinished(&self.fences);
        let Some(stamp) = latest else { return false };
        self.fences.wait(stamp).inspect_err(|e| log::warn!("waiting for freed memory failed: {e:?}")).is_ok()
    }

    /// Whether the device is nearly full: idle memory goes back before more is taken.
    fn short_of_memory(&self, more: usize) -> bool {
        if let Some(left) = crate::source::budget::of(self.driver, self.ordinal).ok().and_then(|b| b.left()) {
            return left < more;
        }
        // 4 us; new memory costs ten times that.
        self.driver.mem_info().is_ok_and(|(free, total)| free < more + total / 20)
    }

    #[cold]
    fn out_of_memory(&self, asked: usize) -> Error {
        let stats = self.stats();
        let (_, largest) = self.idle();
        let device = CurrentContext::enter(self.driver, self.ctx).and_then(|_ctx| self.driver.mem_info());
        let (free, total) = device.unwrap_or((0, 0));
        let limit = crate::source::budget::of(self.driver, self.ordinal).ok().and_then(|b| b.limit());
        let limit = limit.map(|l| format!("; the limit is {} MiB", l >> 20)).unwrap_or_default();
        let detail = format!(
            "the pool holds {} MiB, of which {} MiB are live and {} MiB idle (largest free block {} MiB); the device has {} of {} MiB free{limit}",
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

    // ---- giving back ----

    /// Gives idle memory back to the driver until at most `keep` bytes are held; memory whose work is not finished stays.
    /// Waits for the device only where the driver has no other way to tell what has finished (before CUDA 12.5). Returns the
    /// bytes given back.
    pub fn trim(&self, keep: usize) -> Result<usize, Error> {
        let _ctx = CurrentContext::enter(self.driver, self.ctx)?;
        // First: what comes back now is stamped now.
        self.drain_magazines();
        if !self.capturing(Stream::LEGACY) {
            let settled =
                if self.driver.has_ctx_fences() { self.fences.close() } else { self.fences.wait(self.fences.stamp()) };
            // An error means that less is known to be finished, and less goes back.
            settled.unwrap_or_else(|e| log::debug!("trim: {e:?}"));
        }
        let released = self.release_idle(keep);
        self.wait_for_leaving();
        released
    }

    /// Until the pages are gone that other threads are giving back: whoever trims, counts on the device's free memory afterwards.
    fn wait_for_leaving(&self) {
        let gone = || self.given_back.load(Ordering::Acquire);
        let (seen, leaving) = loop {
            let (seen, leaving) = (gone(), self.releasing.load(Ordering::Acquire));
            if gone() == seen {
                break (seen, leaving);
            }
        };
        let began = Instant::now();
        while gone().wrapping_sub(seen) < leaving && began.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    fn drain_magazines(&self) {
        super::all_magazines().iter().for_each(|m| m.drain(self));
    }

    /// Gives back everything idle, after a wait for the work that still uses it where a wait is allowed. Returns the bytes.
    pub fn give_way(&self) -> Result<usize, Error> {
        let _ctx = CurrentContext::enter(self.driver, self.ctx)?;
        let first = self.trim(0)?;
        if self.capturing(Stream::LEGACY) || !self.wait_for_pending() {
            return Ok(first);
        }
        Ok(first + self.release_idle(0)?)
    }

    pub(super) fn release_idle(&self, keep: usize) -> Result<usize, Error> {
        let _ctx = CurrentContext::enter(self.driver, self.ctx)?;
        let _relaxed = RelaxedCapture::enter(self.driver);
        let _ = self.fences.poll();
        let (pages, bytes) = {
            let mut inner = self.inner.lock();
            inner.flush_all();
            inner.sweep(&self.fences, None, 0);
            let owners: Vec<_> = inner.owners().collect();
            let excess = (inner.stats.held as usize).saturating_sub(keep);
            let pages = inner.take_idle_pages(&self.fences, &owners, excess);
            self.releasing.fetch_add(pages.len(), Ordering::AcqRel);
            let bytes = pages.iter().map(|s| s.size).sum();
            (pages, bytes)
        };
        self.release_pages(pages)?;
        Ok(bytes)
    }

    /// Pages that left the books, and count as on their way back, go back.
    fn release_pages(&self, pages: Vec<Segment>) -> Result<(), Error> {
        let mut first = Ok(());
        for page in pages {
            let released = self.source.release(page);
            self.left(1);
            first = first.and(released);
        }
        Ok(first?)
    }

    /// Pages that counted as on their way are where they went.
    fn left(&self, pages: usize) {
        self.given_back.fetch_add(pages, Ordering::AcqRel);
        self.releasing.fetch_sub(pages, Ordering::AcqRel);
    }

    /// Called now and then: what was not needed since the last two calls goes back, but for a little. True when there may be more to give
    /// back later.
    pub fn decay(&self) -> Result<bool, Error> {
        let enough = |live: u64| live + (live / 16).max(KEPT as u64);
        let (keep, later) = {
            let live = self.stats().live;
            let mut inner = self.inner.lock();
            let peak = inner.recent_peak[0].max(inner.recent_peak[1]).max(live);
            inner.recent_peak = [live, inner.recent_peak[0]];
            inner.moves /= 2;
            let later = inner.stats.held > enough(live);
            if inner.stats.held <= enough(peak) {
                return Ok(later);
            }
            (enough(peak), later)
        };
        self.trim(keep as usize)?;
        Ok(later)
    }

    /// The context died: everything is forgotten. Pages do not belong to a context and are given back; `cuMemAlloc`'s memory
    /// went with its context, and its addresses may be somebody else's by now.
    pub fn abandon(&self) {
        self.dead.store(true, Ordering::Release);
        self.fences.drop_all();
        if self.open.swap(0, Ordering::AcqRel) > 0 {
            super::OPEN_POOLS.fetch_sub(1, Ordering::AcqRel);
        }
        let pages = self.inner.lock().forget();
        for page in pages {
            if self.source.kind() != SourceKind::Vmm {
                self.source.forget(page);
            } else if let Err(e) = self.source.release(page) {
                log::debug!("a page of a dead context could not be given back: {e:?}");
            }
        }
    }

    pub fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }
}

impl Inner {
    /// The owners of what `user` may have: the common ones, and its own.
    fn reach(&mut self, user: User, bins: usize) -> Vec<u32> {
        let mut owners = self.common.to_vec();
        owners.extend(self.owners_of(user, bins).into_iter().filter(|o| !self.common.contains(o)));
        owners
    }

    /// Where the request goes: the window that lacks least, or a range of its own, whose base is given as 0.
    fn window(&mut self, want: Request, user: User, unit: usize, bins: usize) -> Window {
        let size = if want.arena == Arena::Large { want.size } else { want.size.max(unit) };
        let apart = Window {
            start: 0,
            end: 0,
            holes: vec![Hole { base: 0, need: size, room: usize::MAX }],
            lacking: size.next_multiple_of(unit),
        };
        // Small blocks lie wherever a page is.
        if want.arena != Arena::Large {
            return apart;
        }
        let own = self.owners_of(user, bins)[want.arena as usize];
        let mut owners = vec![own, self.common[want.arena as usize]];
        owners.dedup();
        let from = self.pages[want.arena as usize].keys().next().copied().unwrap_or(0);
        let found = window::best(&self.space.gaps(&owners, from), size, unit);
        found.filter(|w| w.lacking <= apart.lacking).unwrap_or(apart)
    }

    /// The free memory of a window becomes `owner`'s, so that it will be one with what is mapped beside it.
    fn own_window(&mut self, arena: Arena, owner: u32, window: &Window) {
        let common = self.common[arena as usize];
        if common == owner {
            return;
        }
        let all = self.space.free_blocks(common);
        let spans: Vec<_> = all.into_iter().map(|b| (b, self.space.addr(b), self.space.size(b))).collect();
        for (b, start, size) in spans {
            if start < window.end && start + size as u64 > window.start {
                self.space.set_owner(b, owner);
            }
        }
    }

    // ---- pages closed to new blocks: another process sees all of a page of which it was given one block ----

    pub fn is_closed(&self, b: BlockId) -> bool {
        table::block(b).special() & (CLOSED | EXPORTED) != 0
    }

    /// The pages of arena `arena` that hold part of a range: base and handles.
    fn pages_over(&self, arena: Arena, start: u64, end: u64) -> Vec<(u64, usize, PageHandle)> {
        let pages = &self.pages[arena as usize];
        let first = pages.range(..=start).next_back().map_or(start, |p| *p.0);
        let over = pages.range(first..end).filter(|(base, page)| **base + page.size as u64 > start);
        over.map(|(&base, page)| (base, page.size, page.handles()[0].0)).collect()
    }

    /// Closes the pages of a live block, and tells of them.
    fn close_pages(&mut self, b: BlockId) -> Shareable {
        let (start, size, arena) = (self.space.addr(b), self.space.size(b), self.arena_of(b));
        let pages = self.pages_over(arena, start, start + size as u64);
        let (from, to) = (pages[0].0, pages.last().map_or(0, |p| p.0 + p.1 as u64));
        self.flush_all();
        for o in self.owners().collect::<Vec<_>>() {
            for free in self.space.free_blocks_from(o, GRANULE) {
                self.close_part(free, from, to, self.closed[arena as usize]);
            }
        }
        for live in self.space.live_blocks(None) {
            if self.space.addr(live) < to && self.space.addr(live) + self.space.size(live) as u64 > from {
                table::block(live).add_special(CLOSED);
            }
        }
        table::block(b).add_special(EXPORTED);
        self.exported.push((b, from, to));
        Shareable {
            offset: (start - from) as usize,
            size,
            pages: pages.iter().map(|&(_, size, handle)| (handle, size)).collect(),
        }
    }

    /// The part of a free block that lies in a range goes to `owner`.
    fn close_part(&mut self, mut b: BlockId, from: u64, to: u64, owner: u32) {
        let (start, end) = (self.space.addr(b), self.space.addr(b) + self.space.size(b) as u64);
        if end <= from || start >= to {
            return;
        }
        if start < from {
            let (_, Some(rest)) = self.space.split(b, (from - start) as usize) else { return };
            b = rest;
        }
        if end > to {
            let size = (to - self.space.addr(b)) as usize;
            self.space.split(b, size);
        }
        self.space.set_owner(b, owner);
    }

    /// Who owns a block's memory after its free: `usual`, unless its pages take no new blocks. When the last block that kept them
    /// closed is freed, they open again: what waited there goes to the parked owners, as freed now.
    pub fn owner_after_free(&mut self, b: BlockId, usual: u32, stamp: u64) -> u32 {
        if !self.is_closed(b) {
            return usual;
        }
        let (start, end) = (self.space.addr(b), self.space.addr(b) + self.space.size(b) as u64);
        let arena = self.arena_of(b);
        self.exported.retain(|e| e.0 != b);
        let still = |from: u64, to: u64, all: &[(BlockId, u64, u64)]| all.iter().any(|e| e.1 < to && e.2 > from);
        for free in self.space.free_blocks_from(self.closed[arena as usize], GRANULE) {
            let (from, to) = (self.space.addr(free), self.space.addr(free) + self.space.size(free) as u64);
            if !still(from, to, &self.exported) {
                let owner = self.parked[arena as usize];
                table::block(free).stamp.store(stamp, Ordering::Relaxed);
                self.space.set_owner(free, owner);
            }
        }
        if still(start, end, &self.exported) { self.closed[arena as usize] } else { self.parked[arena as usize] }
    }
}

impl Pool {
    /// The block that starts at `p` is to be seen by another process: its pages take no new blocks and stay put until it is freed.
    /// `Ok(None)` when it is a whole block of the driver's own, which has its own handles; an error for part of one, whose handle would
    /// show the neighbours.
    pub fn share(&self, p: DevicePtr) -> Result<Option<Shareable>, Error> {
        self.drain_magazines();
        let shared = self.close(p);
        // What was freed meanwhile went to magazines.
        self.drain_magazines();
        shared
    }

    fn close(&self, p: DevicePtr) -> Result<Option<Shareable>, Error> {
        let mut inner = self.inner.lock();
        let (b, size, arena) = inner.live(p).ok_or(Error::UnknownPointer)?;
        if self.source.kind() != SourceKind::Vmm {
            let whole = inner.pages[arena as usize].get(&p).is_some_and(|page| page.size == size);
            return if whole { Ok(None) } else { Err(Error::InvalidArgument) };
        }
        Ok(Some(inner.close_pages(b)))
    }
}
