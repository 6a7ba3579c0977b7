//! What the pool's lock guards: who owns which free space, the bins, the pages. No driver call in here.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use super::fence::Fences;
use super::space::{BlockId, OwnerId, Space};
use super::table::{self, Grain};
use super::{CAPTURE, PoolStats, Request, User};
use crate::driver::DevicePtr;
use crate::source::{Arena, Segment};

pub(super) const ARENAS: [Arena; 3] = [Arena::Tiny, Arena::Small, Arena::Large];

/// Why a block's free goes the long way; the values of `Block::special`, which add up.
pub(super) const RECORDED: u8 = 1;
pub(super) const CAPTURED: u8 = 2;
pub const EXPORTED: u8 = 4;
/// It lies in a page that takes no new blocks.
pub(super) const CLOSED: u8 = 8;

/// Large blocks under this lie at low addresses, close together; the best fit is for those that fill pages of their own.
const LOW: usize = 32 << 20;
/// From so many moved pages on. Sizes that recur at every step want the best fit (a training run held 7 % more without it).
const LOW_MOVES: usize = 16;
/// Of so many idle pages, in the order they should go, the one is taken that fits a hole best.
const LOOK: usize = 64;

/// A page that could move.
#[derive(Clone, Copy)]
pub struct Idle {
    pub arena: Arena,
    pub base: u64,
    pub size: usize,
    /// The order to take them in.
    rank: (usize, u64, usize),
}

/// One owner for each arena.
pub(super) type Owners = [OwnerId; 3];

pub(super) struct Inner {
    pub space: Space,
    streams: HashMap<u64, StreamState>,
    /// Memory that any stream may have: all later work of the context comes after its last use.
    pub common: Owners,
    /// Freed, and in use by work that other streams' later work is not ordered after.
    pub parked: Owners,
    /// Free parts of pages that take no new blocks, because a block there is shared with another process.
    pub closed: Owners,
    /// The arena of every owner, by owner id.
    arenas: Vec<Arena>,
    /// Every page, by arena and base.
    pub pages: [BTreeMap<u64, Segment>; 3],
    /// Live blocks that are also in use on other streams: the keys of those streams.
    recorded: HashMap<BlockId, Vec<u64>>,
    /// Blocks that other processes see, and the range of their pages, which are closed.
    pub exported: Vec<(BlockId, u64, u64)>,
    /// Large blocks are the driver's own, one each, and are never cut: each has its own handle for other processes.
    whole: bool,
    /// Ordered memory is not enough: only what is finished goes to another stream.
    pub finished_only: bool,
    /// Frees without a stream since the last bar: how many, and their bytes.
    pub batch: (usize, usize),
    /// The ordered epoch that the last sweep saw.
    swept: u64,
    pub stats: PoolStats,
    /// Bytes held, by arena.
    pub held_by: [usize; 3],
    /// Pages that had to be moved lately: what says that more idle memory would pay.
    pub moves: usize,
    /// The most that was live since the decay last looked, and before that.
    pub recent_peak: [u64; 2],
}

struct StreamState {
    owners: Owners,
    bins: Vec<Vec<BlockId>>,
}

impl Inner {
    /// `whole`: large blocks are the driver's own.
    pub fn new(mut space: Space, whole: bool) -> Inner {
        let mut arenas = Vec::new();
        let mut three = || {
            ARENAS.map(|arena| {
                arenas.push(arena);
                space.add_owner()
            })
        };
        let (common, parked, closed) = (three(), three(), three());
        Inner {
            space,
            streams: HashMap::new(),
            common,
            parked,
            closed,
            arenas,
            pages: Default::default(),
            recorded: HashMap::new(),
            exported: Vec::new(),
            whole,
            finished_only: false,
            batch: (0, 0),
            swept: 0,
            stats: PoolStats::default(),
            held_by: [0; 3],
            moves: 0,
            recent_peak: [0; 2],
        }
    }

    // ---- owners ----

    /// The owners that new memory for `user` is given, made at first use.
    pub fn owners_of(&mut self, user: User, bins: usize) -> Owners {
        match user {
            User::Everyone => self.common,
            User::Stream(key, _) => self.stream(key, bins),
        }
    }

    fn stream(&mut self, key: u64, bins: usize) -> Owners {
        if let Some(state) = self.streams.get(&key) {
            return state.owners;
        }
        let owners = ARENAS.map(|arena| {
            let o = self.space.add_owner();
            self.arenas.resize(self.arenas.len().max(o as usize + 1), arena);
            self.arenas[o as usize] = arena;
            o
        });
        self.streams.insert(key, StreamState { owners, bins: vec![Vec::new(); bins] });
        owners
    }

    pub fn owners(&self) -> impl Iterator<Item = OwnerId> {
        self.streams.values().flat_map(|s| s.owners).chain(self.common).chain(self.parked)
    }

    pub fn arena_of(&self, b: BlockId) -> Arena {
        self.arenas[self.space.owner(b) as usize]
    }

    // ---- taking ----

    /// Memory that `user` may have at once: the stream's own bin, its free space, what any stream may have.
    pub fn take(&mut self, user: User, want: Request) -> Option<BlockId> {
        if let User::Stream(key, _) = user {
            if let Some(b) = self.take_cached(key, want) {
                return Some(b);
            }
            if let Some(owners) = self.streams.get(&key).map(|s| s.owners)
                && let Some(b) = self.take_free(owners, want)
            {
                return Some(b);
            }
        }
        self.take_free(self.common, want)
    }

    /// A block out of the stream's own bin.
    fn take_cached(&mut self, key: u64, want: Request) -> Option<BlockId> {
        let stream = self.streams.get_mut(&key)?;
        let b = stream.bins[want.bin?].pop()?;
        let owner = stream.owners[want.arena as usize];
        // It may have been cut for another stream, or another owner's arena.
        if self.space.owner(b) != owner {
            self.space.set_owner(b, owner);
        }
        table::block(b).set_cached(false);
        self.stats.cached -= want.size as u64;
        self.stats.hits += 1;
        Some(self.served(b))
    }

    /// A block out of free space.
    pub fn take_free(&mut self, owners: Owners, want: Request) -> Option<BlockId> {
        let owner = owners[want.arena as usize];
        let large = want.arena == Arena::Large;
        let b = if large && self.whole {
            self.space.alloc_whole(owner, want.size, want.size + want.size / 4)?
        } else if large && want.size < LOW && self.moves >= LOW_MOVES {
            self.space.alloc_low(owner, want.size)?
        } else {
            self.space.alloc(owner, want.size)?
        };
        if let Some(bin) = want.bin.filter(|_| self.space.size(b) == want.size) {
            table::block(b).set_bin(bin + 1);
        }
        Some(self.served(b))
    }

    fn served(&mut self, b: BlockId) -> BlockId {
        self.stats.mallocs += 1;
        b
    }

    // ---- freeing ----

    /// The live block at `p`, with its bytes and arena.
    pub fn live(&self, p: DevicePtr) -> Option<(BlockId, usize, Arena)> {
        let b = self.space.lookup(p)?;
        Some((b, self.space.size(b), self.arena_of(b)))
    }

    /// Whether the block was recorded on streams other than `key`; it is forgotten that it was.
    pub fn was_recorded_elsewhere(&mut self, b: BlockId, key: Option<u64>) -> bool {
        self.recorded.remove(&b).is_some_and(|users| users.iter().any(|&user| Some(user) != key))
    }

    pub fn record(&mut self, b: BlockId, key: u64) {
        let users = self.recorded.entry(b).or_default();
        if !users.contains(&key) {
            users.push(key);
        }
        table::block(b).add_special(RECORDED);
    }

    /// Keeps a block whole in the bin of stream `key`. It is live or cached elsewhere.
    pub fn cache(&mut self, b: BlockId, key: u64, bin: usize, bins: usize, stamp: u64) {
        let owner = self.stream(key, bins)[self.arena_of(b) as usize];
        self.space.set_owner(b, owner);
        let block = table::block(b);
        block.stamp.store(stamp, Relaxed);
        block.set_cached(true);
        self.stats.cached += self.space.size(b) as u64;
        self.streams.get_mut(&key).expect("the stream was just looked up").bins[bin].push(b);
    }

    /// Takes up to `n` blocks out of the bin of stream `key`, most recent first; they stay cached, and are the caller's.
    pub fn lend(&mut self, key: u64, bin: usize, n: usize, out: &mut Vec<BlockId>) {
        if let Some(stream) = self.streams.get_mut(&key) {
            let keep = stream.bins[bin].len().saturating_sub(n);
            for b in stream.bins[bin].drain(keep..) {
                self.stats.cached -= self.space.size(b) as u64;
                out.push(b);
            }
        }
    }

    // ---- bins and owners give way ----

    /// Bins that hold far more than is asked give their blocks to the free space before new memory is taken.
    pub fn flush_share(&mut self, user: User, want: Request) {
        let User::Stream(key, _) = user else { return };
        let Some(stream) = self.streams.get(&key) else { return };
        let cached: usize = stream.bins.iter().flatten().map(|&b| self.space.size(b)).sum();
        if want.bin.is_some() && cached >= 4 * want.size && cached >= self.held_by[want.arena as usize] / 4 {
            self.flush(key);
        }
    }

    fn flush(&mut self, key: u64) {
        let Some(stream) = self.streams.get_mut(&key) else {
            return;
        };
        for b in stream.bins.iter_mut().flat_map(std::mem::take) {
            self.stats.cached -= self.space.size(b) as u64;
            let (owner, stamp) = (self.space.owner(b), self.space.stamp(b));
            self.space.free(b, owner, stamp);
        }
    }

    pub fn flush_all(&mut self) {
        let keys: Vec<u64> = self.streams.keys().copied().collect();
        for key in keys {
            self.flush(key);
        }
    }

    /// Free bytes that other users than `user` own, bins included; what was freed in a capture stays there.
    pub fn elsewhere(&self, user: User) -> usize {
        let mine = if let User::Stream(key, _) = user { Some(key) } else { None };
        let others = self.streams.iter().filter(|(k, _)| Some(**k) != mine && **k & CAPTURE == 0);
        let bytes = |s: &StreamState| {
            let binned: usize = s.bins.iter().flatten().map(|&b| self.space.size(b)).sum();
            binned + s.owners.iter().map(|&o| self.space.free_bytes(o)).sum::<usize>()
        };
        others.map(|(_, s)| bytes(s)).sum::<usize>() + self.parked_bytes()
    }

    pub fn parked_bytes(&self) -> usize {
        self.parked.iter().map(|&o| self.space.free_bytes(o)).sum()
    }

    /// Moves what any stream may have by now to the common owners, and forgets streams that own nothing. Bins of other streams that
    /// hold less than `worth` bytes keep their blocks: they could not serve the request. `except` keeps its own.
    pub fn sweep(&mut self, fences: &Fences, except: Option<User>, worth: usize) {
        let seen = if self.finished_only { fences.finished() } else { fences.ordered() };
        if seen == self.swept && except.is_some() {
            return;
        }
        self.swept = seen;
        let mine = if let Some(User::Stream(key, _)) = except { Some(key) } else { None };
        let keys: Vec<u64> = self.streams.keys().copied().filter(|k| Some(*k) != mine).collect();
        for key in keys {
            let stream = &self.streams[&key];
            let owners = stream.owners;
            let cached: usize = stream.bins.iter().flatten().map(|&b| self.space.size(b)).sum();
            if cached >= worth {
                self.flush(key);
            }
            self.sweep_owners(owners, seen);
            if owners.iter().all(|&o| self.space.owns_nothing(o)) {
                owners.iter().for_each(|&o| self.space.remove_owner(o));
                self.streams.remove(&key);
            }
        }
        self.sweep_owners(self.parked, seen);
    }

    fn sweep_owners(&mut self, owners: Owners, seen: u64) {
        for (from, to) in owners.into_iter().zip(self.common) {
            if self.space.free_bytes(from) == 0 {
                continue;
            }
            for b in self.space.free_blocks_from(from, super::space::GRANULE) {
                // Blocks of `from` never merge while they leave it, so the ids stay good.
                if self.space.stamp(b) <= seen {
                    self.space.set_owner(b, to);
                }
            }
        }
    }

    /// With one stream in all, what is anybody's is that stream's: free memory that two owners have does not merge, and a block then goes
    /// to the better half of what is there (twice as many pages move for it). Another stream gets it as it gets all finished memory.
    pub fn give_to_only_stream(&mut self, user: User) {
        let User::Stream(key, _) = user else { return };
        if key & CAPTURE != 0 || self.streams.len() != 1 {
            return;
        }
        let Some(owners) = self.streams.get(&key).map(|s| s.owners) else { return };
        for (from, to) in self.common.into_iter().zip(owners) {
            for b in self.space.free_blocks_from(from, super::space::GRANULE) {
                self.space.set_owner(b, to);
            }
        }
    }

    /// The latest stamp of free memory that is not finished, captures' aside.
    pub fn latest_unfinished(&self, fences: &Fences) -> Option<u64> {
        let blocks = self.owners().flat_map(|o| self.space.free_blocks_from(o, super::space::GRANULE));
        blocks.map(|b| self.space.stamp(b)).filter(|&s| s != super::NEVER && !fences.is_finished(s)).max()
    }

    // ---- pages ----

    /// The pages of a new segment are `owner`'s free space; pages that lie side by side become one stretch, `cuMemAlloc`'s blocks do
    /// not. Err when the tables have run out: the segment is the caller's still.
    pub fn add_pages(&mut self, segment: Segment, arena: Arena, owner: OwnerId, paged: bool) -> Result<(), Segment> {
        let (base, size) = (segment.base, segment.size);
        let added = if paged {
            let grain = match arena {
                Arena::Tiny => Grain::Granule,
                Arena::Small => Grain::Page,
                Arena::Large => Grain::Any,
            };
            self.space.join_region(base, size, owner, grain)
        } else {
            self.space.add_region(base, size, owner, Grain::Granule)
        };
        if added.is_none() {
            return Err(segment);
        }
        self.held(arena, segment.size as isize);
        self.stats.grown += 1;
        for page in segment.into_pages() {
            self.pages[arena as usize].insert(page.base, page);
        }
        Ok(())
    }

    /// Wholly free, finished pages of `owners` outside a range: first those whose leaving breaks the least. That is those of small
    /// free blocks that consist of whole pages, and the last of a block first, so that the rest stays in one piece. (With the largest
    /// blocks first, twice as many pages move; without a look at the blocks' sizes, 7 % more near a limit.)
    pub fn idle_pages(&self, fences: &Fences, owners: &[OwnerId], outside: &Range<u64>) -> Vec<Idle> {
        let mut out: Vec<Idle> = Vec::new();
        for &o in owners {
            let arena = self.arenas[o as usize];
            let pages = &self.pages[arena as usize];
            let Some(smallest) = pages.values().map(|p| p.size).min() else { continue };
            for b in self.space.free_blocks_from(o, smallest) {
                if !fences.is_finished(self.space.stamp(b)) {
                    continue;
                }
                let (start, size) = (self.space.addr(b), self.space.size(b));
                let end = start + size as u64;
                let over = |base: u64, size: usize| base < outside.end && base + size as u64 > outside.start;
                let inside = pages.range(start..end).map(|(&base, page)| (base, page.size));
                let inside = inside.filter(|&(base, size)| base + size as u64 <= end && !over(base, size));
                let first = out.len();
                out.extend(inside.map(|(base, size)| Idle { arena, base, size, rank: (0, start, 0) }));
                let broken = size - out[first..].iter().map(|p| p.size).sum::<usize>();
                out[first..]
                    .iter_mut()
                    .rev()
                    .enumerate()
                    .for_each(|(i, p)| (p.rank.0, p.rank.2) = (broken + size / 8, i));
            }
        }
        out.sort_unstable_by_key(|p| p.rank);
        out
    }

    /// Idle pages leave the books. Those that cannot, because the records have run out, stay.
    pub fn take_pages(&mut self, mut idle: Vec<Idle>, owners: &[OwnerId]) -> Vec<Segment> {
        // From the end of a block on, so that what comes before keeps its record.
        idle.sort_unstable_by_key(|p| std::cmp::Reverse(p.base));
        let mut free: Vec<(u64, BlockId)> = Vec::new();
        for &o in owners {
            free.extend(self.space.free_blocks_from(o, super::space::GRANULE).iter().map(|&b| (self.space.addr(b), b)));
        }
        free.sort_unstable();
        let mut out = Vec::new();
        for page in idle {
            let at = free.partition_point(|&(addr, _)| addr <= page.base);
            if self.space.remove_range(free[at - 1].1, page.base, page.size) {
                out.extend(self.pages[page.arena as usize].remove(&page.base));
                self.held(page.arena, -(page.size as isize));
            }
        }
        out
    }

    /// The pages for a hole of `need` bytes with room for `room`, out of `idle`, which come in the order to take them. They are marked as
    /// taken by the size 0.
    pub fn choose(idle: &mut [Idle], need: usize, room: usize, page: usize) -> Vec<Idle> {
        let (mut got, mut out, mut from) = (0, Vec::new(), 0);
        while got < need {
            while idle.get(from).is_some_and(|p| p.size == 0) {
                from += 1;
            }
            // What is more than is needed is lost to others; what is less than a page costs another move.
            let left = need - got;
            let loss = |p: &Idle| match p.size {
                size if size >= left => size - left,
                size if size >= page => 0,
                _ => usize::MAX,
            };
            let fits = |p: &&mut Idle| p.size > 0 && p.size <= room - got;
            let Some(best) = idle[from..].iter_mut().filter(fits).take(LOOK).min_by_key(|p| loss(p)) else { break };
            got += best.size;
            out.push(*best);
            best.size = 0;
        }
        out
    }

    /// Wholly free, finished pages leave the books, until `bytes` are taken.
    pub fn take_idle_pages(&mut self, fences: &Fences, owners: &[OwnerId], bytes: usize) -> Vec<Segment> {
        let mut left = bytes;
        let mut idle = self.idle_pages(fences, owners, &(0..0));
        idle.retain(|p| {
            let wanted = left > 0;
            left = left.saturating_sub(p.size);
            wanted
        });
        self.take_pages(idle, owners)
    }

    pub fn held(&mut self, arena: Arena, change: isize) {
        self.stats.held = self.stats.held.wrapping_add_signed(change as i64);
        self.stats.peak_held = self.stats.peak_held.max(self.stats.held);
        let by = &mut self.held_by[arena as usize];
        *by = by.wrapping_add_signed(change);
    }

    /// Everything is forgotten: the pages that there were.
    pub fn forget(&mut self) -> Vec<Segment> {
        self.space.forget_all();
        self.streams.clear();
        self.recorded.clear();
        self.exported.clear();
        self.batch = (0, 0);
        self.held_by = [0; 3];
        (self.stats.held, self.stats.cached) = (0, 0);
        std::mem::take(&mut self.pages).into_iter().flat_map(BTreeMap::into_values).collect()
    }

    #[cfg(test)]
    pub fn check(&self) -> Result<(), String> {
        self.space.check()?;
        let binned: usize =
            self.streams.values().flat_map(|s| s.bins.iter().flatten()).map(|&b| self.space.size(b)).sum();
        let held: usize = self.pages.iter().flat_map(BTreeMap::values).map(|p| p.size).sum();
        if (binned as u64, held as u64) != (self.stats.cached, self.stats.held) {
            return Err(format!("{binned} bytes in bins, {held} held; the books say {:?}", self.stats));
        }
        if self.space.total() != held {
            return Err(format!("regions of {} bytes in pages of {held}", self.space.total()));
        }
        if let Some(b) = self.recorded.keys().find(|&&b| self.space.lookup(self.space.addr(b)) != Some(b)) {
            return Err(format!("block {b} is recorded on a stream but not live"));
        }
        Ok(())
    }
}
