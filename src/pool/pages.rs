//! The cold half of an allocation, and memory on its way back: fences, growth, pages that move, what was idle for long. Driver calls
//! are made here, with no lock held.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::inner::Inner;
use super::space::{BlockId, GRANULE};
use super::table;
use super::{BATCH, BATCH_FLOOR, BATCH_SHARE, MAX_PENDING, MIB, Pool, Request, SourceKind, TINY, User};
use crate::driver::{CurrentContext, RelaxedCapture, Stream};
use crate::error::Error;
use crate::source::{Arena, Segment};

/// New memory comes in pieces that grow with the pool, between these, so that a small program holds little and a large one makes
/// few driver calls. A larger request gets what it asks for.
const PIECE: (usize, usize) = (2 * MIB, 32 * MIB);
/// A piece is this share of what the arena holds.
const PIECE_SHARE: usize = 64;
/// Pages that are moved for one request at most (55 us each): past that, new memory is cheaper than a heap of small pages.
const MOVED: usize = 16;
/// Idle memory that never goes back by itself, at least: what the next small program step needs anyway.
const KEPT: usize = 16 * MIB;
/// How often an allocation that the driver refuses is tried again while other threads give memory back.
const RETRIES: usize = 64;

impl Inner {
    pub fn batch_is_due(&self) -> bool {
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
        let piece = self.piece(want);
        if self.within_slack(want, piece) {
            match self.grow(want, user, piece) {
                Err(Error::OutOfMemory { .. }) => {}
                other => return other,
            }
        }
        if let Some(b) = self.move_pages(want, user, fenced)? {
            return Ok(b);
        }
        match self.grow(want, user, piece) {
            Err(Error::OutOfMemory { .. }) => {}
            other => return other,
        }
        // The driver, or the limit, has no more. Others may be giving back or taking at the same moment: try for as long as that
        // changes anything.
        self.drain_magazines();
        for _ in 0..RETRIES {
            if let Some(b) = self.take_anything(want, user) {
                return Ok(b);
            }
            let released = self.release_idle(0)?;
            match self.grow(want, user, want.size) {
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

    /// Memory that others freed: first what one barrier on the device makes anybody's, then what has finished. Never waits.
    fn take_elsewhere(&self, want: Request, user: User, fenced: bool) -> Option<BlockId> {
        let everyone = matches!(user, User::Everyone);
        let parked = {
            let mut inner = self.inner.lock();
            inner.flush_share(user, want);
            if !(everyone && inner.batch_is_due())
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

    /// What is taken from the source for `want`.
    fn piece(&self, want: Request) -> usize {
        let held = self.inner.lock().held_by[want.arena as usize];
        (held / PIECE_SHARE).clamp(PIECE.0, PIECE.1).max(want.size)
    }

    /// Whether the pool may hold `more` bytes without looking for pages to move.
    fn within_slack(&self, want: Request, more: usize) -> bool {
        let (held, live) = {
            let inner = self.inner.lock();
            let in_use = inner.space.used_total() as u64 - inner.stats.cached + want.size as u64;
            (inner.stats.held, inner.stats.peak_live.max(in_use))
        };
        let room = live as f64 * (1.0 + self.slack) + PIECE.1 as f64;
        held as f64 + more as f64 <= room && !self.short_of_memory(more)
    }

    /// New memory of `bytes`, or a little more, and the block out of it. Where free space borders on the end of the arena, only what it
    /// lacks is taken.
    fn grow(&self, want: Request, user: User, bytes: usize) -> Result<BlockId, Error> {
        let tail = {
            let mut inner = self.inner.lock();
            let owner = inner.owners_of(user, self.bins.len())[want.arena as usize];
            inner.tail(want.arena, owner)
        };
        if let Some((end, free)) = tail
            && free < want.size
        {
            let lacking = (bytes - free.min(bytes - GRANULE)).max(want.size - free);
            if let Some(segment) = self.source.acquire_at(end, lacking)?
                && let Some(b) = self.add(segment, want, user)?
            {
                return Ok(b);
            }
        }
        let segment = self.source.acquire(want.arena, bytes)?;
        // Another thread may have taken the tail that this one counted on; a whole segment always fits.
        self.add(segment, want, user)?.ok_or(Error::OutOfMemory { asked: want.size, detail: None })
    }

    /// The segment becomes free space of `user`, and the block is cut from it.
    fn add(&self, segment: Segment, want: Request, user: User) -> Result<Option<BlockId>, Error> {
        let paged = self.source.kind() == SourceKind::Vmm;
        let refused = {
            let mut inner = self.inner.lock();
            let owners = inner.owners_of(user, self.bins.len());
            match inner.add_pages(segment, want.arena, owners[want.arena as usize], paged) {
                Ok(()) => return Ok(inner.take_free(owners, want)),
                Err(segment) => segment,
            }
        };
        log::warn!("the tables for blocks are full");
        self.source.release(refused)?;
        Ok(None)
    }

    // ---- pages that move ----

    /// Wholly free pages move to a new range that fits the request. None when there are not enough of them.
    fn move_pages(&self, want: Request, user: User, fenced: bool) -> Result<Option<BlockId>, Error> {
        if self.source.kind() != SourceKind::Vmm {
            return Ok(None);
        }
        if fenced {
            let _ = self.fences.close();
        }
        let _ = self.fences.poll();
        let pages = {
            let mut inner = self.inner.lock();
            inner.sweep(&self.fences, None, usize::MAX);
            let owners: Vec<_> = inner.common.into_iter().chain(inner.owners_of(user, self.bins.len())).collect();
            let idle: usize = owners.iter().map(|&o| inner.space.free_bytes(o)).sum();
            if idle < want.size {
                return Ok(None);
            }
            let pages = inner.take_idle_pages(&self.fences, &owners, want.size);
            self.releasing.fetch_add(pages.len(), Ordering::AcqRel);
            pages
        };
        let (count, bytes) = (pages.len(), pages.iter().map(|p| p.size).sum::<usize>());
        if count == 0 {
            return Ok(None);
        }
        // Too few: they go on into what is new, when new memory may be had.
        let size = want.size.max(bytes);
        let gathered = if count > MOVED && bytes < want.size {
            let released = pages.into_iter().try_for_each(|page| self.source.release(page));
            released.and_then(|()| self.source.acquire(want.arena, size))
        } else {
            self.source.gather(want.arena, pages, size)
        };
        self.releasing.fetch_sub(count, Ordering::AcqRel);
        match gathered.map_err(Error::from) {
            Ok(segment) => self.add(segment, want, user),
            Err(Error::OutOfMemory { .. }) => Ok(None),
            Err(e) => Err(e),
        }
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
        if !self.capturing(Stream::LEGACY) {
            let settled =
                if self.driver.has_ctx_fences() { self.fences.close() } else { self.fences.wait(self.fences.stamp()) };
            // An error means that less is known to be finished, and less goes back.
            settled.unwrap_or_else(|e| log::debug!("trim: {e:?}"));
        }
        self.drain_magazines();
        self.release_idle(keep)
    }

    fn drain_magazines(&self) {
        let all = self.magazines.lock().clone();
        all.iter().for_each(|m| m.drain(self));
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
        let mut first = Ok(());
        for page in pages {
            let released = self.source.release(page);
            self.releasing.fetch_sub(1, Ordering::AcqRel);
            first = first.and(released);
        }
        first?;
        Ok(bytes)
    }

    /// Called now and then: what was not needed since the last two calls goes back, but for a little. Returns the bytes.
    pub fn decay(&self) -> Result<usize, Error> {
        let keep = {
            let mut inner = self.inner.lock();
            let live = inner.space.used_total() as u64 - inner.stats.cached;
            let peak = inner.recent_peak[0].max(inner.recent_peak[1]).max(live);
            inner.recent_peak = [live, inner.recent_peak[0]];
            let keep = peak + (peak / 16).max(KEPT as u64);
            if inner.stats.held <= keep {
                return Ok(0);
            }
            keep
        };
        self.trim(keep as usize)
    }

    /// The context died: everything is forgotten. Pages do not belong to a context and are given back; `cuMemAlloc`'s memory
    /// went with its context, and its addresses may be somebody else's by now.
    pub fn abandon(&self) {
        self.dead.store(true, Ordering::Release);
        self.fences.drop_all();
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
    /// Where `arena` ends, and the bytes of the free block of `owner` there.
    fn tail(&self, arena: Arena, owner: u32) -> Option<(u64, usize)> {
        let end = self.pages[arena as usize].values().next_back().map(|p| p.base + p.size as u64)?;
        Some((end, self.space.free_tail(end, owner).map_or(0, |b| self.space.size(b))))
    }

    // ---- pages closed to new blocks ----

    pub fn is_closed(&self, b: BlockId) -> bool {
        table::block(b).special.load(Ordering::Relaxed) & (super::inner::CLOSED | super::inner::EXPORTED) != 0
    }

    /// Who owns a block's memory after its free: `usual`, unless its page takes no new blocks.
    pub fn owner_after_free(&self, b: BlockId, usual: u32) -> u32 {
        let _ = b;
        usual
    }
}
