//! Free space: exact, coalescing best-fit allocation over ranges of device addresses.
//!
//! A `Space` knows nothing of streams, drivers or locks. It cuts *regions* (contiguous address ranges that somebody else
//! obtained) into *blocks*, multiples of [`GRANULE`] bytes, and gives every block an *owner*: a stream of the pool, or a
//! manager of the cnmem door. Free blocks merge with free neighbours of the same owner only, so memory that one owner may
//! use at once never mixes with memory that must first be waited for. A free block carries the *stamp* of its latest free;
//! what a stamp means is the caller's business (see `fence.rs`).
//!
//! Finding a block is O(1): each owner has a two-level bitmap over size classes (powers of two cut into 16), as TLSF has;
//! within a class the best of the first [`SCAN`] blocks is taken.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

/// The unit of placement, in bytes. CUDA promises 256-byte alignment; CNMeM, CUB and PyTorch place on 512.
pub const GRANULE: usize = 512;
/// How many blocks of one size class are compared before the best so far is taken.
const SCAN: usize = 16;
/// Second-level classes between two powers of two.
const SUB_BITS: u32 = 4;
const SUB: usize = 1 << SUB_BITS;
/// Powers of two, in granules: 2^42 granules are 2 PiB, more than any device addresses.
const TOP: usize = 42;
const NIL: BlockId = 0;

/// Names a block of one `Space`; reused after the block is merged away.
pub type BlockId = u32;
/// Names an owner of one `Space`; reused after `remove_owner`.
pub type OwnerId = u32;

/// `size` rounded up to the granule; None when that overflows.
pub fn round_up(size: usize) -> Option<usize> {
    size.checked_next_multiple_of(GRANULE)
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// The record is unused.
    Vacant,
    /// In its owner's free index.
    Free,
    /// In use by the program.
    Live,
    /// Freed by the program and kept whole, in a bin or a magazine: neither free space nor live.
    Cached,
}

#[derive(Clone, Copy)]
struct Block {
    addr: u64,
    size: usize,
    /// Neighbours by address within the region.
    left: BlockId,
    right: BlockId,
    /// Neighbours in the free list of the size class.
    prev: BlockId,
    next: BlockId,
    stamp: u64,
    owner: OwnerId,
    state: State,
}

const VACANT: Block =
    Block { addr: 0, size: 0, left: NIL, right: NIL, prev: NIL, next: NIL, stamp: 0, owner: 0, state: State::Vacant };

/// The free blocks of one owner, by size class.
struct Owner {
    used: bool,
    top: u64,
    sub: [u16; TOP],
    heads: Box<[[BlockId; SUB]; TOP]>,
    free: usize,
    live: usize,
    cached: usize,
}

impl Owner {
    fn new() -> Owner {
        let heads = Box::new([[NIL; SUB]; TOP]);
        Owner { used: true, top: 0, sub: [0; TOP], heads, free: 0, live: 0, cached: 0 }
    }

    fn bytes(&mut self, state: State) -> &mut usize {
        match state {
            State::Free => &mut self.free,
            State::Live => &mut self.live,
            State::Cached => &mut self.cached,
            State::Vacant => unreachable!("a vacant record has no bytes"),
        }
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

/// Block addresses are multiples of 512 and well spread: one multiplication hashes them.
#[derive(Default)]
pub struct AddrHasher(u64);

impl Hasher for AddrHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for &b in bytes {
            self.write_u64(u64::from(b));
        }
    }
    fn write_u64(&mut self, n: u64) {
        self.0 = (self.0 ^ (n >> 9)).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(26);
    }
}

type AddrMap = HashMap<u64, BlockId, BuildHasherDefault<AddrHasher>>;

pub struct Space {
    blocks: Vec<Block>,
    vacant: Vec<BlockId>,
    owners: Vec<Owner>,
    /// Start address of every live or cached block.
    starts: AddrMap,
    /// Start address of every region: its size and its first block.
    regions: BTreeMap<u64, (usize, BlockId)>,
}

impl Space {
    pub fn new() -> Space {
        Space {
            blocks: vec![VACANT],
            vacant: Vec::new(),
            owners: Vec::new(),
            starts: AddrMap::default(),
            regions: BTreeMap::new(),
        }
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
        o.free == 0 && o.live == 0 && o.cached == 0
    }

    // ---- the two hot operations ----

    /// A live block of `size` bytes, rounded up to the granule, from `o`'s free space: the best fit, its low end; what is
    /// left over stays free.
    pub fn alloc(&mut self, o: OwnerId, size: usize) -> Option<BlockId> {
        let size = round_up(size.max(1))?;
        let b = self.find(o, size)?;
        self.unlist(b);
        if self.blocks[b as usize].size > size {
            let rest = self.cut(b, size);
            self.list(rest);
        }
        let block = &mut self.blocks[b as usize];
        block.state = State::Live;
        let addr = block.addr;
        self.owners[o as usize].live += size;
        self.starts.insert(addr, b);
        Some(b)
    }

    /// A live or cached block becomes free space of `o`, merged with `o`'s free neighbours. Returns the merged block.
    pub fn free(&mut self, b: BlockId, o: OwnerId, stamp: u64) -> BlockId {
        let block = &mut self.blocks[b as usize];
        debug_assert!(matches!(block.state, State::Live | State::Cached));
        let (addr, size, old, state) = (block.addr, block.size, block.owner, block.state);
        block.owner = o;
        block.stamp = stamp;
        block.state = State::Free;
        *self.owners[old as usize].bytes(state) -= size;
        self.starts.remove(&addr);
        self.merge_and_list(b)
    }

    /// This very free block, whole, becomes a live block of `o`. Returns its address.
    pub fn take(&mut self, b: BlockId, o: OwnerId, stamp: u64) -> u64 {
        self.unlist(b);
        let block = &mut self.blocks[b as usize];
        (block.owner, block.state, block.stamp) = (o, State::Live, stamp);
        let (addr, size) = (block.addr, block.size);
        self.owners[o as usize].live += size;
        self.starts.insert(addr, b);
        addr
    }

    // ---- blocks kept whole by a bin or a magazine ----

    /// A live block is kept whole for `o`: no longer live, not yet free space.
    pub fn cache(&mut self, b: BlockId, o: OwnerId, stamp: u64) {
        self.restate(b, State::Live, State::Cached, o, stamp);
    }

    /// A cached block goes to the program again.
    pub fn uncache(&mut self, b: BlockId, o: OwnerId) {
        let stamp = self.blocks[b as usize].stamp;
        self.restate(b, State::Cached, State::Live, o, stamp);
    }

    fn restate(&mut self, b: BlockId, from: State, to: State, o: OwnerId, stamp: u64) {
        let block = &mut self.blocks[b as usize];
        debug_assert_eq!(block.state, from);
        let (size, old) = (block.size, block.owner);
        block.state = to;
        block.owner = o;
        block.stamp = stamp;
        *self.owners[old as usize].bytes(from) -= size;
        *self.owners[o as usize].bytes(to) += size;
    }

    // ---- questions ----

    /// The live block that starts exactly at `addr`.
    pub fn lookup(&self, addr: u64) -> Option<BlockId> {
        let b = *self.starts.get(&addr)?;
        (self.blocks[b as usize].state == State::Live).then_some(b)
    }
    pub fn addr(&self, b: BlockId) -> u64 {
        self.blocks[b as usize].addr
    }
    pub fn size(&self, b: BlockId) -> usize {
        self.blocks[b as usize].size
    }
    pub fn owner(&self, b: BlockId) -> OwnerId {
        self.blocks[b as usize].owner
    }
    pub fn stamp(&self, b: BlockId) -> u64 {
        self.blocks[b as usize].stamp
    }
    pub fn is_free(&self, b: BlockId) -> bool {
        self.blocks[b as usize].state == State::Free
    }
    pub fn free_bytes(&self, o: OwnerId) -> usize {
        self.owners[o as usize].free
    }
    pub fn live_bytes(&self, o: OwnerId) -> usize {
        self.owners[o as usize].live
    }
    pub fn cached_bytes(&self, o: OwnerId) -> usize {
        self.owners[o as usize].cached
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
        let owner = &self.owners[o as usize];
        let mut out: Vec<BlockId> = owner.heads.iter().flatten().flat_map(|&h| self.chain(h)).collect();
        out.sort_unstable_by_key(|&b| self.addr(b));
        out
    }
    /// The live blocks of `o`, or of everybody, by address.
    pub fn live_blocks(&self, o: Option<OwnerId>) -> Vec<BlockId> {
        let mine = |b: &BlockId| {
            let block = &self.blocks[*b as usize];
            block.state == State::Live && o.is_none_or(|o| o == block.owner)
        };
        let mut out: Vec<BlockId> = self.starts.values().copied().filter(mine).collect();
        out.sort_unstable_by_key(|&b| self.addr(b));
        out
    }

    // ---- moving free space about ----

    /// A block changes its owner; a free one merges with its new owner's free neighbours. Returns the block it is then.
    pub fn set_owner(&mut self, b: BlockId, o: OwnerId) -> BlockId {
        let Block { state, owner: old, size, .. } = self.blocks[b as usize];
        if state == State::Free {
            self.unlist(b);
            self.blocks[b as usize].owner = o;
            return self.merge_and_list(b);
        }
        *self.owners[old as usize].bytes(state) -= size;
        *self.owners[o as usize].bytes(state) += size;
        self.blocks[b as usize].owner = o;
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
        self.list(rest);
        (b, Some(rest))
    }

    // ---- regions ----

    /// A new address range becomes one free block of `o`. `base` and `size` are multiples of the granule.
    pub fn add_region(&mut self, base: u64, size: usize, o: OwnerId) -> BlockId {
        debug_assert!(size > 0 && size.is_multiple_of(GRANULE) && base.is_multiple_of(GRANULE as u64));
        let b = self.new_block(Block { addr: base, size, owner: o, state: State::Free, ..VACANT });
        self.regions.insert(base, (size, b));
        self.list(b);
        b
    }

    /// The region that ends at `base` grows by `size` bytes: one more free block of `o`, not merged with its neighbour until
    /// either changes. None when no region ends there.
    pub fn extend_region(&mut self, base: u64, size: usize, o: OwnerId) -> Option<BlockId> {
        debug_assert!(size > 0 && size.is_multiple_of(GRANULE));
        let (&start, &(whole, mut last)) = self.regions.range(..base).next_back()?;
        if start + whole as u64 != base {
            return None;
        }
        let first = last;
        while self.blocks[last as usize].right != NIL {
            last = self.blocks[last as usize].right;
        }
        let b = self.new_block(Block { addr: base, size, left: last, owner: o, state: State::Free, ..VACANT });
        self.blocks[last as usize].right = b;
        self.regions.insert(start, (whole + size, first));
        self.list(b);
        Some(b)
    }

    /// Forgets the addresses from `base` on, `size` bytes (multiples of the granule), which must lie in one region and be
    /// wholly free, whoever owns the parts. What is left of the region on either side becomes regions of their own. Err, and
    /// nothing changed, while a block there is in use.
    pub fn remove_region(&mut self, base: u64, size: usize) -> Result<(), ()> {
        let end = base + size as u64;
        let (&start, &(whole, first)) = self.regions.range(..=base).next_back().ok_or(())?;
        if end > start + whole as u64 {
            return Err(());
        }
        let (mut b, mut inside) = (first, Vec::new());
        while b != NIL && self.addr(b) < end {
            if self.addr(b) + self.size(b) as u64 > base {
                if !self.is_free(b) {
                    return Err(());
                }
                inside.push(b);
            }
            b = self.blocks[b as usize].right;
        }
        // The outermost two may reach beyond the range.
        let (head, tail) = (inside[0], inside[inside.len() - 1]);
        if self.addr(tail) + self.size(tail) as u64 > end {
            let size = (end - self.addr(tail)) as usize;
            self.split(tail, size);
        }
        if self.addr(head) < base {
            let size = (base - self.addr(head)) as usize;
            let (_, rest) = self.split(head, size);
            inside[0] = rest.expect("the block reaches into the range");
        }
        let left = self.blocks[inside[0] as usize].left;
        let right = self.blocks[inside[inside.len() - 1] as usize].right;
        for b in inside {
            self.unlist(b);
            self.drop_block(b);
        }
        self.regions.remove(&start);
        if left != NIL {
            self.blocks[left as usize].right = NIL;
            self.regions.insert(start, ((base - start) as usize, first));
        }
        if right != NIL {
            self.blocks[right as usize].left = NIL;
            self.regions.insert(end, ((start + whole as u64 - end) as usize, right));
        }
        Ok(())
    }

    /// Forgets a region and every block in it, live ones too.
    pub fn forget_region(&mut self, base: u64, size: usize) {
        for b in self.region_blocks(base, size) {
            let Block { state, owner, size, addr, .. } = self.blocks[b as usize];
            if state == State::Free {
                self.unlist(b);
            } else {
                *self.owners[owner as usize].bytes(state) -= size;
                self.starts.remove(&addr);
            }
            self.drop_block(b);
        }
        self.regions.remove(&base);
    }

    /// The free stretches of the region at `base`, by address: start, end and latest stamp of each run of free blocks,
    /// whoever owns them.
    pub fn free_runs(&self, base: u64) -> Vec<(u64, u64, u64)> {
        let mut out: Vec<(u64, u64, u64)> = Vec::new();
        let mut b = self.regions.get(&base).map_or(NIL, |r| r.1);
        while b != NIL {
            let Block { addr, size, stamp, state, right, .. } = self.blocks[b as usize];
            if state == State::Free {
                match out.last_mut() {
                    Some((_, end, latest)) if *end == addr => {
                        (*end, *latest) = (addr + size as u64, stamp.max(*latest))
                    }
                    _ => out.push((addr, addr + size as u64, stamp)),
                }
            }
            b = right;
        }
        out
    }

    /// Bytes of all regions.
    pub fn total(&self) -> usize {
        self.regions.values().map(|r| r.0).sum()
    }

    fn region_blocks(&self, base: u64, size: usize) -> Vec<BlockId> {
        let Some(&(whole, first)) = self.regions.get(&base) else {
            return Vec::new();
        };
        assert_eq!(whole, size, "a region is forgotten as it stands");
        let mut out = Vec::new();
        let mut b = first;
        while b != NIL {
            out.push(b);
            b = self.blocks[b as usize].right;
        }
        out
    }

    // ---- inside ----

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
        self.chain(head).take(scan).filter(|&b| self.size(b) >= size).min_by_key(|&b| self.size(b))
    }

    fn chain(&self, head: BlockId) -> impl Iterator<Item = BlockId> {
        std::iter::successors((head != NIL).then_some(head), |&b| {
            let next = self.blocks[b as usize].next;
            (next != NIL).then_some(next)
        })
    }

    /// Cuts `b` (in no list) to `size`; the rest is a new block, in no list, to its right.
    fn cut(&mut self, b: BlockId, size: usize) -> BlockId {
        let Block { addr, size: whole, right, owner, stamp, .. } = self.blocks[b as usize];
        let rest = self.new_block(Block {
            addr: addr + size as u64,
            size: whole - size,
            left: b,
            right,
            owner,
            stamp,
            state: State::Free,
            ..VACANT
        });
        self.blocks[b as usize].size = size;
        self.blocks[b as usize].right = rest;
        if right != NIL {
            self.blocks[right as usize].left = rest;
        }
        rest
    }

    /// `b` is free and in no list: it takes in its free neighbours of the same owner and is listed.
    fn merge_and_list(&mut self, mut b: BlockId) -> BlockId {
        let Block { left, right, .. } = self.blocks[b as usize];
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
        let Block { size, right, stamp, .. } = self.blocks[b as usize];
        let into = &mut self.blocks[a as usize];
        into.size += size;
        into.right = right;
        into.stamp = into.stamp.max(stamp);
        if right != NIL {
            self.blocks[right as usize].left = a;
        }
        self.drop_block(b);
    }

    fn list(&mut self, b: BlockId) {
        let Block { size, owner, .. } = self.blocks[b as usize];
        let (top, sub) = class_of(size);
        let o = &mut self.owners[owner as usize];
        let head = std::mem::replace(&mut o.heads[top][sub], b);
        o.top |= 1 << top;
        o.sub[top] |= 1 << sub;
        o.free += size;
        let block = &mut self.blocks[b as usize];
        block.state = State::Free;
        block.prev = NIL;
        block.next = head;
        if head != NIL {
            self.blocks[head as usize].prev = b;
        }
    }

    fn unlist(&mut self, b: BlockId) {
        let Block { size, owner, prev, next, .. } = self.blocks[b as usize];
        let (top, sub) = class_of(size);
        let o = &mut self.owners[owner as usize];
        o.free -= size;
        if next != NIL {
            self.blocks[next as usize].prev = prev;
        }
        if prev != NIL {
            self.blocks[prev as usize].next = next;
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

    fn new_block(&mut self, block: Block) -> BlockId {
        match self.vacant.pop() {
            Some(b) => {
                self.blocks[b as usize] = block;
                b
            }
            None => {
                self.blocks.push(block);
                (self.blocks.len() - 1) as BlockId
            }
        }
    }

    fn drop_block(&mut self, b: BlockId) {
        self.blocks[b as usize] = VACANT;
        self.vacant.push(b);
    }

    // ---- the invariant walk ----

    /// Walks everything: regions are covered by their blocks without gap or overlap, lists and bitmaps agree with the
    /// blocks, every byte is counted once. Err says what is wrong.
    #[cfg(test)]
    pub fn check(&self) -> Result<(), String> {
        let mut seen = vec![(0usize, 0usize, 0usize); self.owners.len()];
        let (mut count, mut starts, mut end_before) = (0, 0, 0u64);
        for (&base, &(size, first)) in &self.regions {
            if base < end_before {
                return Err(format!("region {base:#x} overlaps the one before it"));
            }
            end_before = base + size as u64;
            let (mut at, mut left, mut b) = (base, NIL, first);
            while b != NIL {
                let k = self.blocks[b as usize];
                if k.addr != at || k.left != left || k.size == 0 || !k.size.is_multiple_of(GRANULE) {
                    return Err(format!("block {b} at {:#x} (size {}) does not follow {at:#x}", k.addr, k.size));
                }
                let sums = &mut seen[k.owner as usize];
                match k.state {
                    State::Free => sums.0 += k.size,
                    State::Live => sums.1 += k.size,
                    State::Cached => sums.2 += k.size,
                    State::Vacant => return Err(format!("block {b} is vacant but linked")),
                }
                if k.state != State::Free {
                    starts += 1;
                    if self.starts.get(&k.addr) != Some(&b) {
                        return Err(format!("block {b} at {:#x} cannot be found by address", k.addr));
                    }
                }
                count += 1;
                at += k.size as u64;
                left = b;
                b = k.right;
            }
            if at != base + size as u64 {
                return Err(format!("region {base:#x}: blocks end at {at:#x}"));
            }
        }
        if starts != self.starts.len() || count != self.blocks.len() - 1 - self.vacant.len() {
            return Err(format!("{count} blocks linked, {starts} in use; the tables say otherwise"));
        }
        for (i, o) in self.owners.iter().enumerate() {
            let sums = seen[i];
            if (o.free, o.live, o.cached) != sums || (!o.used && sums != (0, 0, 0)) {
                return Err(format!("owner {i} counts {:?}, its blocks sum to {sums:?}", (o.free, o.live, o.cached)));
            }
            self.check_lists(i as OwnerId, o)?;
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
                    let k = &self.blocks[b as usize];
                    if k.state != State::Free || k.owner != i || class_of(k.size) != (top, sub) {
                        return Err(format!("owner {i}: block {b} is listed in class {top}.{sub} wrongly"));
                    }
                    listed += k.size;
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

#[cfg(test)]
mod tests;
