//! Free space: exact, coalescing best-fit allocation over ranges of device addresses.
//!
//! A `Space` knows nothing of streams, drivers or locks. It cuts *regions* (contiguous address ranges that somebody else
//! obtained) into *blocks*, multiples of [`GRANULE`] bytes, and gives every block an *owner*: a stream of the pool, or a
//! manager of the cnmem door. Free blocks merge with free neighbours of the same owner only, so memory that one owner may
//! use at once never mixes with memory that must first be waited for. A free block carries the *stamp* of its latest free;
//! what a stamp means is the caller's business (see `fence.rs`).
//!
//! Finding a block is O(1): each owner has a two-level bitmap over size classes (powers of two cut into 16), as TLSF has;
//! within a class the best of the first [`SCAN`] blocks is taken. Records and the way from an address to its block are the
//! process's (`table.rs`).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};

use parking_lot::Mutex;

pub use super::table::BlockId;
use super::table::{self, Block, Grain, NIL, State};
use super::window::Stretch;

/// The unit of placement, in bytes. CUDA promises 256-byte alignment; CNMeM, CUB and PyTorch place on 512.
pub const GRANULE: usize = 512;
/// How many blocks of one size class are compared before the best so far is taken.
const SCAN: usize = 16;
/// Second-level classes between two powers of two.
const SUB_BITS: u32 = 4;
const SUB: usize = 1 << SUB_BITS;
/// Powers of two, in granules: 2^42 granules are 2 PiB, more than any device addresses.
const TOP: usize = 42;

/// Bytes of addresses above the last region, as far as a gap counts them.
const BEYOND: u64 = 1 << 46;

/// Names an owner of one `Space`; reused after `remove_owner`.
pub type OwnerId = u32;

/// `size` rounded up to the granule; None when that overflows.
pub fn round_up(size: usize) -> Option<usize> {
    size.checked_next_multiple_of(GRANULE)
}

/// The free blocks of one owner, by size class.
struct Owner {
    used: bool,
    top: u64,
    sub: [u16; TOP],
    heads: Box<[[BlockId; SUB]; TOP]>,
    /// Bytes of its free blocks, and of its blocks in use (live or cached).
    free: usize,
    in_use: usize,
}

impl Owner {
    fn new() -> Owner {
        let heads = Box::new([[NIL; SUB]; TOP]);
        Owner { used: true, top: 0, sub: [0; TOP], heads, free: 0, in_use: 0 }
    }

    /// The first class at or after (`top`, `sub`) that holds a block.
    fn class_from(&self, top: usize, sub: usize) -> Option<(usize, usize)> {
        if top >= TOP {
            return None;
        }
        let here = if sub < SUB { self.sub[top] & (!0u16 << sub) } else { 0 };
        if here != 0 {
            return Some((top, here.trailing_zeros() as usize));
        }
        let above = if top + 1 < 64 { self.top & (!0u64 << (top + 1)) } else { 0 };
        (above != 0).then(|| {
            let t = above.trailing_zeros() as usize;
            (t, self.sub[t].trailing_zeros() as usize)
        })
    }
}

/// The size class of `size` bytes: (power of two, step). A class holds sizes from its own lower bound up.
fn class_of(size: usize) -> (usize, usize) {
    let granules = size / GRANULE;
    let top = granules.ilog2();
    let sub = if top >= SUB_BITS {
        (granules >> (top - SUB_BITS)) & (SUB - 1)
    } else {
        (granules << (SUB_BITS - top)) & (SUB - 1)
    };
    (top as usize, sub)
}

/// A contiguous range of addresses: its bytes, its first and its last block.
#[derive(Clone, Copy)]
struct Region {
    size: usize,
    first: BlockId,
    last: BlockId,
}

pub struct Space {
    id: u16,
    vacant: Vec<BlockId>,
    owners: Vec<Owner>,
    /// Bytes of all blocks in use.
    in_use: usize,
    /// By start address.
    regions: BTreeMap<u64, Region>,
}

/// Ids of spaces that are gone; ids are handed out from 1.
static SPACES: Mutex<Vec<u16>> = Mutex::new(Vec::new());

// Records are read and written under the lock that the space's owner holds.
fn k(b: BlockId) -> &'static Block {
    table::block(b)
}

impl Space {
    /// None when the process has no address space for the tables, or far too many spaces.
    pub fn new() -> Option<Space> {
        static NEXT: AtomicU16 = AtomicU16::new(1);
        if !table::available() {
            return None;
        }
        let fresh = || NEXT.fetch_update(Relaxed, Relaxed, |n| n.checked_add(1)).ok();
        let id = SPACES.lock().pop().or_else(fresh)?;
        Some(Space { id, vacant: Vec::new(), owners: Vec::new(), in_use: 0, regions: BTreeMap::new() })
    }

    /// What the records of its blocks name as their space.
    pub fn id(&self) -> u16 {
        self.id
    }

    // ---- owners ----

    pub fn add_owner(&mut self) -> OwnerId {
        match self.owners.iter().position(|o| !o.used) {
            Some(i) => {
                self.owners[i] = Owner::new();
                i as OwnerId
            }
            None => {
                self.owners.push(Owner::new());
                (self.owners.len() - 1) as OwnerId
            }
        }
    }

    /// The owner must own no bytes.
    pub fn remove_owner(&mut self, o: OwnerId) {
        assert!(self.owns_nothing(o), "an owner that still owns memory was removed");
        self.owners[o as usize].used = false;
    }

    pub fn owns_nothing(&self, o: OwnerId) -> bool {
        let o = &self.owners[o as usize];
        o.free == 0 && o.in_use == 0
    }

    // ---- the two hot operations ----

    /// A live block of `size` bytes, rounded up to the granule, from `o`'s free space: the best fit, its low end; what is
    /// left over stays free.
    pub fn alloc(&mut self, o: OwnerId, size: usize) -> Option<BlockId> {
        let size = round_up(size.max(1))?;
        let b = self.find(o, size)?;
        Some(self.take_part(b, o, size))
    }

    /// As `alloc`, from the lowest address where it fits. Blocks that are small beside a page go there, so that they lie close together
    /// and the pages above become wholly free: 30 % fewer pages have to be moved than with the best fit.
    pub fn alloc_low(&mut self, o: OwnerId, size: usize) -> Option<BlockId> {
        let size = round_up(size.max(1))?;
        let mut lowest: Option<(u64, BlockId)> = None;
        self.each_free_from(o, size, |addr, b| {
            if lowest.is_none_or(|(at, _)| addr < at) {
                lowest = Some((addr, b));
            }
        });
        Some(self.take_part(lowest?.1, o, size))
    }

    /// The low end of a free block that is large enough.
    fn take_part(&mut self, b: BlockId, o: OwnerId, size: usize) -> BlockId {
        self.unlist(b);
        if self.size(b) > size
            && let Some(rest) = self.cut(b, size)
        {
            self.list(rest);
        }
        self.use_block(b, o);
        b
    }

    /// Whether `o` has a free block of exactly `size` bytes, among the first of its class.
    pub fn has_exactly(&self, o: OwnerId, size: usize) -> bool {
        let (top, sub) = class_of(size);
        top < TOP && self.chain(self.owners[o as usize].heads[top][sub]).take(SCAN).any(|b| self.size(b) == size)
    }

    /// As `alloc`, but nothing is cut off: the best block of `size` to `most` bytes, whole.
    pub fn alloc_whole(&mut self, o: OwnerId, size: usize, most: usize) -> Option<BlockId> {
        let b = self.find(o, round_up(size)?).filter(|&b| self.size(b) <= most)?;
        self.unlist(b);
        self.use_block(b, o);
        Some(b)
    }

    /// A live or cached block becomes free space of `o`, merged with `o`'s free neighbours. Returns the merged block.
    pub fn free(&mut self, b: BlockId, o: OwnerId, stamp: u64) -> BlockId {
        let block = k(b);
        debug_assert!(matches!(block.state(), State::Live | State::Cached));
        let old = block.owner.load(Relaxed);
        self.owners[old as usize].in_use -= self.size(b);
        self.in_use -= self.size(b);
        block.set_free();
        block.waste.store(0, Relaxed);
        block.serial.fetch_add(1, Relaxed);
        block.owner.store(o, Relaxed);
        block.stamp.store(stamp, Relaxed);
        table::withdraw(self.addr(b));
        self.merge_and_list(b)
    }

    /// This very free block, whole, becomes a live block of `o`. Returns its address.
    pub fn take(&mut self, b: BlockId, o: OwnerId, stamp: u64) -> u64 {
        self.unlist(b);
        k(b).stamp.store(stamp, Relaxed);
        self.use_block(b, o);
        self.addr(b)
    }

    fn use_block(&mut self, b: BlockId, o: OwnerId) {
        k(b).owner.store(o, Relaxed);
        self.owners[o as usize].in_use += self.size(b);
        self.in_use += self.size(b);
        table::publish(b);
    }

    // ---- questions ----

    /// The live block of this space that starts exactly at `addr`.
    pub fn lookup(&self, addr: u64) -> Option<BlockId> {
        let (b, block) = table::find(addr)?;
        (block.space.load(Relaxed) == self.id && block.state() == State::Live).then_some(b)
    }
    /// The block in use that holds `addr`, which may lie inside it.
    pub fn containing(&self, addr: u64) -> Option<BlockId> {
        let (&base, region) = self.regions.range(..=addr).next_back()?;
        if addr >= base + region.size as u64 {
            return None;
        }
        // Large blocks are few; from whichever end is nearer.
        let mut b = region.first;
        while b != NIL && self.addr(b) + self.size(b) as u64 <= addr {
            b = k(b).right.load(Relaxed);
        }
        (b != NIL && k(b).state() == State::Live).then_some(b)
    }
    pub fn addr(&self, b: BlockId) -> u64 {
        k(b).addr.load(Relaxed)
    }
    pub fn size(&self, b: BlockId) -> usize {
        k(b).size.load(Relaxed) as usize
    }
    pub fn owner(&self, b: BlockId) -> OwnerId {
        k(b).owner.load(Relaxed)
    }
    pub fn stamp(&self, b: BlockId) -> u64 {
        k(b).stamp.load(Relaxed)
    }
    pub fn is_free(&self, b: BlockId) -> bool {
        k(b).is_free()
    }
    pub fn free_bytes(&self, o: OwnerId) -> usize {
        self.owners[o as usize].free
    }
    /// Bytes of the owner's blocks in use, live or cached.
    pub fn used_bytes(&self, o: OwnerId) -> usize {
        self.owners[o as usize].in_use
    }
    /// Bytes in use, live or cached, of all owners.
    pub fn used_total(&self) -> usize {
        self.in_use
    }
    /// Bytes of the largest free block of `o`; 0 when there is none.
    pub fn largest_free(&self, o: OwnerId) -> usize {
        let owner = &self.owners[o as usize];
        if owner.top == 0 {
            return 0;
        }
        let top = owner.top.ilog2() as usize;
        let sub = owner.sub[top].ilog2() as usize;
        self.chain(owner.heads[top][sub]).map(|b| self.size(b)).max().unwrap_or(0)
    }
    /// The free blocks of `o`, by address.
    pub fn free_blocks(&self, o: OwnerId) -> Vec<BlockId> {
        let mut out = self.free_blocks_from(o, GRANULE);
        out.sort_unstable_by_key(|&b| self.addr(b));
        out
    }
    /// The free blocks of `o` that have at least `size` bytes, in no order.
    pub fn free_blocks_from(&self, o: OwnerId, size: usize) -> Vec<BlockId> {
        let mut out = Vec::new();
        self.each_free_from(o, size, |_, b| out.push(b));
        out
    }
    fn each_free_from(&self, o: OwnerId, size: usize, mut see: impl FnMut(u64, BlockId)) {
        let owner = &self.owners[o as usize];
        let (mut t, mut s) = class_of(size);
        while let Some((found_t, found_s)) = owner.class_from(t, s) {
            for b in self.chain(owner.heads[found_t][found_s]).filter(|&b| self.size(b) >= size) {
                see(self.addr(b), b);
            }
            (t, s) = (found_t, found_s + 1);
        }
    }
    /// What lies between live blocks, by address: the free blocks of `owners`, and the addresses from `from` on beside them that are in
    /// no region.
    pub fn gaps(&self, owners: &[OwnerId], from: u64) -> Vec<Vec<Stretch>> {
        let mut free: Vec<BlockId> = owners.iter().flat_map(|&o| self.free_blocks_from(o, GRANULE)).collect();
        free.sort_unstable_by_key(|&b| self.addr(b));
        let mut gaps: Vec<Vec<Stretch>> = Vec::new();
        let mut at = None;
        for b in free {
            let (start, size) = (self.addr(b), self.size(b));
            let end = start + size as u64;
            if at != Some(start) {
                gaps.push(Vec::new());
                if k(b).left.load(Relaxed) == NIL
                    && let Some((&base, region)) = self.regions.range(from..start).next_back()
                {
                    let before = base + region.size as u64;
                    gaps.last_mut().expect("a gap was begun").push(Stretch {
                        start: before,
                        size: (start - before) as usize,
                        mapped: false,
                    });
                }
            }
            gaps.last_mut().expect("a gap was begun").push(Stretch { start, size, mapped: true });
            at = Some(end);
            if k(b).right.load(Relaxed) == NIL {
                let next = self.regions.range(end..).next().map_or(end.saturating_add(BEYOND), |(&base, _)| base);
                gaps.last_mut().expect("a gap was begun").push(Stretch {
                    start: end,
                    size: (next - end) as usize,
                    mapped: false,
                });
                at = Some(next);
            }
        }
        gaps
    }
    /// The live blocks of `o`, or of everybody, by address.
    pub fn live_blocks(&self, o: Option<OwnerId>) -> Vec<BlockId> {
        let mine = |b: &BlockId| k(*b).state() == State::Live && o.is_none_or(|o| o == self.owner(*b));
        self.regions.values().flat_map(|r| self.row(r.first)).filter(mine).collect()
    }

    // ---- moving free space about ----

    /// A block changes its owner; a free one merges with its new owner's free neighbours. Returns the block it is then.
    pub fn set_owner(&mut self, b: BlockId, o: OwnerId) -> BlockId {
        if self.is_free(b) {
            self.unlist(b);
            k(b).owner.store(o, Relaxed);
            return self.merge_and_list(b);
        }
        let (old, size) = (self.owner(b), self.size(b));
        self.owners[old as usize].in_use -= size;
        self.owners[o as usize].in_use += size;
        k(b).owner.store(o, Relaxed);
        b
    }

    /// Cuts a free block: the first part has exactly `size` bytes (a multiple of the granule), the rest is a second free
    /// block of the same owner. The two merge again when either changes.
    pub fn split(&mut self, b: BlockId, size: usize) -> (BlockId, Option<BlockId>) {
        debug_assert!(self.is_free(b) && size > 0 && size.is_multiple_of(GRANULE) && size <= self.size(b));
        if self.size(b) == size {
            return (b, None);
        }
        self.unlist(b);
        let rest = self.cut(b, size);
        self.list(b);
        if let Some(rest) = rest {
            self.list(rest);
        }
        (b, rest)
    }

    // ---- regions ----

    /// A new address range becomes one free block of `o`. `base` and `size` are multiples of the granule; `grain` says what may be
    /// cut from it. None when the records have run out, or the addresses are beyond the table.
    pub fn add_region(&mut self, base: u64, size: usize, o: OwnerId, grain: Grain) -> Option<BlockId> {
        debug_assert!(size > 0 && size.is_multiple_of(GRANULE) && base.is_multiple_of(GRANULE as u64));
        let b = self.fresh(base, size, o, grain)?;
        self.regions.insert(base, Region { size, first: b, last: b });
        self.list(b);
        Some(b)
    }

    /// As `add_region`, but what touches other regions becomes one region with them, and the new block merges with free neighbours.
    pub fn join_region(&mut self, base: u64, size: usize, o: OwnerId, grain: Grain) -> Option<BlockId> {
        let b = self.fresh(base, size, o, grain)?;
        let mut whole = Region { size, first: b, last: b };
        let mut start = base;
        if let Some((&before, &r)) = self.regions.range(..base).next_back()
            && before + r.size as u64 == base
        {
            k(r.last).right.store(b, Relaxed);
            k(b).left.store(r.last, Relaxed);
            (whole.first, whole.size, start) = (r.first, whole.size + r.size, before);
        }
        if let Some(r) = self.regions.remove(&(base + size as u64)) {
            k(r.first).left.store(b, Relaxed);
            k(b).right.store(r.first, Relaxed);
            (whole.last, whole.size) = (r.last, whole.size + r.size);
        }
        self.regions.insert(start, whole);
        Some(self.merge_and_list(b))
    }

    /// The region that ends at `base` grows by `size` bytes: one more free block of `o`, not merged with its neighbour until
    /// either changes. None when no region ends there.
    pub fn extend_region(&mut self, base: u64, size: usize, o: OwnerId, grain: Grain) -> Option<BlockId> {
        debug_assert!(size > 0 && size.is_multiple_of(GRANULE));
        let (&start, &region) = self.regions.range(..base).next_back()?;
        if start + region.size as u64 != base {
            return None;
        }
        let b = self.fresh(base, size, o, grain)?;
        k(b).left.store(region.last, Relaxed);
        k(region.last).right.store(b, Relaxed);
        self.regions.insert(start, Region { size: region.size + size, last: b, ..region });
        self.list(b);
        Some(b)
    }

    /// Forgets the addresses from `base` on, `size` bytes (multiples of the granule), which lie in the free block `b`. What is left of
    /// the block stays free, what is left of the region on either side becomes regions of their own. False, and nothing changed,
    /// when the records have run out.
    pub fn remove_range(&mut self, b: BlockId, base: u64, size: usize) -> bool {
        let end = base + size as u64;
        debug_assert!(self.is_free(b) && self.addr(b) <= base && end <= self.addr(b) + self.size(b) as u64);
        let mut b = b;
        if self.addr(b) < base {
            let head = (base - self.addr(b)) as usize;
            let (_, Some(rest)) = self.split(b, head) else { return false };
            b = rest;
        }
        if self.size(b) > size && self.split(b, size).1.is_none() {
            return false;
        }
        let (&start, &region) = self.regions.range(..=base).next_back().expect("the block lies in a region");
        let (left, right) = (k(b).left.load(Relaxed), k(b).right.load(Relaxed));
        self.unlist(b);
        self.drop_block(b);
        self.regions.remove(&start);
        if left != NIL {
            k(left).right.store(NIL, Relaxed);
            self.regions.insert(start, Region { size: (base - start) as usize, first: region.first, last: left });
        }
        if right != NIL {
            k(right).left.store(NIL, Relaxed);
            let size = (start + region.size as u64 - end) as usize;
            self.regions.insert(end, Region { size, first: right, last: region.last });
        }
        true
    }

    /// Forgets every region and every block, live ones too.
    pub fn forget_all(&mut self) {
        for region in std::mem::take(&mut self.regions).into_values() {
            for b in self.row(region.first).collect::<Vec<_>>() {
                if self.is_free(b) {
                    self.unlist(b);
                } else {
                    let (owner, size) = (self.owner(b), self.size(b));
                    self.owners[owner as usize].in_use -= size;
                    self.in_use -= size;
                    table::withdraw(self.addr(b));
                }
                self.drop_block(b);
            }
        }
    }

    /// The free stretches of the region at `base`, by address: start, end and latest stamp of each run of free blocks,
    /// whoever owns them.
    pub fn free_runs(&self, base: u64) -> Vec<(u64, u64, u64)> {
        let mut out: Vec<(u64, u64, u64)> = Vec::new();
        for b in self.row(self.regions.get(&base).map_or(NIL, |r| r.first)) {
            if !self.is_free(b) {
                continue;
            }
            let (addr, stamp) = (self.addr(b), self.stamp(b));
            let end = addr + self.size(b) as u64;
            match out.last_mut() {
                Some((_, before, latest)) if *before == addr => (*before, *latest) = (end, stamp.max(*latest)),
                _ => out.push((addr, end, stamp)),
            }
        }
        out
    }

    /// Bytes of all regions.
    pub fn total(&self) -> usize {
        self.regions.values().map(|r| r.size).sum()
    }

    // ---- inside ----

    /// The blocks from `first` on to the end of its region.
    fn row(&self, first: BlockId) -> impl Iterator<Item = BlockId> + use<> {
        std::iter::successors((first != NIL).then_some(first), |&b| {
            let next = k(b).right.load(Relaxed);
            (next != NIL).then_some(next)
        })
    }

    /// The best free block of `o` for `size` (a multiple of the granule).
    fn find(&self, o: OwnerId, size: usize) -> Option<BlockId> {
        let owner = &self.owners[o as usize];
        let (top, sub) = class_of(size);
        if top >= TOP {
            return None;
        }
        let own = owner.heads[top][sub];
        // The request's own class may hold blocks that are too small; classes above hold none.
        if let Some(b) = self.best_of(own, size, SCAN) {
            return Some(b);
        }
        if let Some((t, s)) = owner.class_from(top, sub + 1) {
            return self.best_of(owner.heads[t][s], size, SCAN);
        }
        self.best_of(own, size, usize::MAX)
    }

    fn best_of(&self, head: BlockId, size: usize, scan: usize) -> Option<BlockId> {
        self.chain(head).take(scan).filter(|&b| self.size(b) >= size).min_by_key(|&b| (self.size(b), self.addr(b)))
    }

    /// The free list that begins with `head`.
    fn chain(&self, head: BlockId) -> impl Iterator<Item = BlockId> + use<> {
        std::iter::successors((head != NIL).then_some(head), |&b| {
            let next = k(b).next.load(Relaxed);
            (next != NIL).then_some(next)
        })
    }

    /// Cuts `b` (in no list) to `size`; the rest is a new block, in no list, to its right. None, and nothing changed, when the
    /// records have run out.
    fn cut(&mut self, b: BlockId, size: usize) -> Option<BlockId> {
        let (addr, whole, owner) = (self.addr(b), self.size(b), self.owner(b));
        let rest = self.new_block(addr + size as u64, whole - size, owner)?;
        let (block, new) = (k(b), k(rest));
        let right = block.right.load(Relaxed);
        new.left.store(b, Relaxed);
        new.right.store(right, Relaxed);
        new.stamp.store(self.stamp(b), Relaxed);
        block.size.store(size as u64, Relaxed);
        block.right.store(rest, Relaxed);
        if right == NIL {
            let (_, region) = self.regions.range_mut(..=addr).next_back().expect("the block lies in a region");
            region.last = rest;
        } else {
            k(right).left.store(rest, Relaxed);
        }
        Some(rest)
    }

    /// `b` is free and in no list: it takes in its free neighbours of the same owner and is listed.
    fn merge_and_list(&mut self, mut b: BlockId) -> BlockId {
        let (left, right) = (k(b).left.load(Relaxed), k(b).right.load(Relaxed));
        if self.mergeable(b, right) {
            self.unlist(right);
            self.absorb(b, right);
        }
        if self.mergeable(b, left) {
            self.unlist(left);
            self.absorb(left, b);
            b = left;
        }
        self.list(b);
        b
    }

    fn mergeable(&self, b: BlockId, n: BlockId) -> bool {
        n != NIL && self.is_free(n) && self.owner(n) == self.owner(b)
    }

    /// `a` takes in its right neighbour `b`; both are in no list.
    fn absorb(&mut self, a: BlockId, b: BlockId) {
        let (into, block) = (k(a), k(b));
        let right = block.right.load(Relaxed);
        into.size.store((self.size(a) + self.size(b)) as u64, Relaxed);
        into.right.store(right, Relaxed);
        into.stamp.store(self.stamp(a).max(self.stamp(b)), Relaxed);
        if right == NIL {
            let addr = self.addr(a);
            let (_, region) = self.regions.range_mut(..=addr).next_back().expect("the block lies in a region");
            region.last = a;
        } else {
            k(right).left.store(a, Relaxed);
        }
        self.drop_block(b);
    }

    fn list(&mut self, b: BlockId) {
        let (size, block) = (self.size(b), k(b));
        let (top, sub) = class_of(size);
        let o = &mut self.owners[block.owner.load(Relaxed) as usize];
        let head = std::mem::replace(&mut o.heads[top][sub], b);
        o.top |= 1 << top;
        o.sub[top] |= 1 << sub;
        o.free += size;
        block.set_free();
        block.prev.store(NIL, Relaxed);
        block.next.store(head, Relaxed);
        if head != NIL {
            k(head).prev.store(b, Relaxed);
        }
    }

    fn unlist(&mut self, b: BlockId) {
        let (size, block) = (self.size(b), k(b));
        let (prev, next) = (block.prev.load(Relaxed), block.next.load(Relaxed));
        let (top, sub) = class_of(size);
        let o = &mut self.owners[block.owner.load(Relaxed) as usize];
        o.free -= size;
        if next != NIL {
            k(next).prev.store(prev, Relaxed);
        }
        if prev != NIL {
            k(prev).next.store(next, Relaxed);
            return;
        }
        o.heads[top][sub] = next;
        if next == NIL {
            o.sub[top] &= !(1 << sub);
            if o.sub[top] == 0 {
                o.top &= !(1 << top);
            }
        }
    }

    fn fresh(&mut self, base: u64, size: usize, o: OwnerId, grain: Grain) -> Option<BlockId> {
        if !table::covers(base, size) {
            return None;
        }
        table::cover(base, size, grain);
        self.new_block(base, size, o)
    }

    /// A free block in no list and in no region yet.
    fn new_block(&mut self, addr: u64, size: usize, owner: OwnerId) -> Option<BlockId> {
        let b = self.vacant.pop().or_else(table::new_block)?;
        let block = k(b);
        block.addr.store(addr, Relaxed);
        block.size.store(size as u64, Relaxed);
        block.stamp.store(0, Relaxed);
        block.owner.store(owner, Relaxed);
        block.space.store(self.id, Relaxed);
        for link in [&block.left, &block.right, &block.prev, &block.next] {
            link.store(NIL, Relaxed);
        }
        block.set_free();
        Some(b)
    }

    fn drop_block(&mut self, b: BlockId) {
        k(b).set_vacant();
        k(b).addr.store(0, Relaxed);
        self.vacant.push(b);
    }

    // ---- the invariant walk ----

    /// Walks everything: regions are covered by their blocks without gap or overlap, lists and bitmaps agree with the
    /// blocks, every byte is counted once. Err says what is wrong.
    #[cfg(test)]
    pub fn check(&self) -> Result<(), String> {
        let mut seen = vec![(0usize, 0usize); self.owners.len()];
        let mut end_before = 0u64;
        for (&base, region) in &self.regions {
            if base < end_before {
                return Err(format!("region {base:#x} overlaps the one before it"));
            }
            end_before = base + region.size as u64;
            let (mut at, mut left) = (base, NIL);
            for b in self.row(region.first) {
                let (addr, size) = (self.addr(b), self.size(b));
                if addr != at || k(b).left.load(Relaxed) != left || size == 0 || !size.is_multiple_of(GRANULE) {
                    return Err(format!("block {b} at {addr:#x} (size {size}) does not follow {at:#x}"));
                }
                let sums = &mut seen[self.owner(b) as usize];
                match k(b).state() {
                    State::Free => sums.0 += size,
                    State::Live | State::Cached => sums.1 += size,
                    State::Vacant => return Err(format!("block {b} is vacant but linked")),
                }
                let found = table::find(addr).map(|f| f.0);
                if found != (!self.is_free(b)).then_some(b) || k(b).space.load(Relaxed) != self.id {
                    return Err(format!("block {b} at {addr:#x} is found by address as {found:?}"));
                }
                at += size as u64;
                left = b;
            }
            if at != end_before || left != region.last {
                return Err(format!("region {base:#x}: blocks end at {at:#x}, the last is {left}"));
            }
        }
        for (i, o) in self.owners.iter().enumerate() {
            let sums = seen[i];
            if (o.free, o.in_use) != sums || (!o.used && sums != (0, 0)) {
                return Err(format!("owner {i} counts {:?}, its blocks sum to {sums:?}", (o.free, o.in_use)));
            }
            self.check_lists(i as OwnerId, o)?;
        }
        let sum: usize = self.owners.iter().map(|o| o.in_use).sum();
        if sum != self.in_use {
            return Err(format!("{} bytes in use, the owners have {sum}", self.in_use));
        }
        Ok(())
    }

    #[cfg(test)]
    fn check_lists(&self, i: OwnerId, o: &Owner) -> Result<(), String> {
        let mut listed = 0;
        for (top, row) in o.heads.iter().enumerate() {
            for (sub, &head) in row.iter().enumerate() {
                if (head != NIL) != (o.sub[top] & (1 << sub) != 0) {
                    return Err(format!("owner {i}: bitmap and list disagree in class {top}.{sub}"));
                }
                for b in self.chain(head) {
                    if !self.is_free(b) || self.owner(b) != i || class_of(self.size(b)) != (top, sub) {
                        return Err(format!("owner {i}: block {b} is listed in class {top}.{sub} wrongly"));
                    }
                    listed += self.size(b);
                }
            }
            if (o.sub[top] != 0) != (o.top & (1 << top) != 0) {
                return Err(format!("owner {i}: top bitmap is wrong at {top}"));
            }
        }
        if listed != o.free {
            return Err(format!("owner {i}: {listed} bytes listed, {} counted free", o.free));
        }
        Ok(())
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        self.forget_all();
        table::give_back(&mut self.vacant);
        SPACES.lock().push(self.id);
    }
}

#[cfg(test)]
mod tests;
