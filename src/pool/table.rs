//! Pointer to block, without a lock or a hash: block records at addresses that never move, and a flat table over device
//! addresses that names the block in use that starts there.
//!
//! ```text
//! address >> 21  ->  leaf  ->  (address in the slot) >> 9, 12 or 18  ->  entry: which block, its bin, live or cached
//! ```
//! An entry says all that a free needs to know, so that one cache line is touched and the record is not. The table and the records lie
//! in reserved address space, of which the system backs only what is touched. Leaves cost 0.003 % of the device memory they cover where
//! blocks are large, 0.2 % where none is smaller than 4 KiB, 1.6 % elsewhere.
//!
//! Who may write what: the table and a record's fields are written under the lock of the space that owns the address, but for
//! whether a block in use is live or cached, which whoever holds the block may change. Anybody may read at any time; leaves and records
//! are never unmapped, so a stale read finds an entry or a record that does not match.

use std::sync::atomic::{
    AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};

use once_cell::sync::Lazy;
use parking_lot::Mutex;

/// Names a block record of the process; reused after the block is merged away. 0 names none.
pub type BlockId = u32;
pub const NIL: BlockId = 0;

/// What a block is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// The record is unused.
    Vacant,
    /// In its owner's free index.
    Free,
    /// In use by the program.
    Live,
    /// Freed by the program and kept whole, in a bin or a magazine: neither free space nor live.
    Cached,
}

/// `Block::kept`.
const VACANT: u8 = 0;
const FREE: u8 = 1;
/// Live or cached: its entry tells.
const USED: u8 = 2;

/// One block: a cache line. Sizes in bytes.
#[repr(align(64))]
pub struct Block {
    pub addr: AtomicU64,
    pub size: AtomicU64,
    /// When it was last freed; what that means is the pool's business.
    pub stamp: AtomicU64,
    /// Neighbours by address within the region.
    pub left: AtomicU32,
    pub right: AtomicU32,
    /// Neighbours in the free list of the size class.
    pub prev: AtomicU32,
    pub next: AtomicU32,
    pub owner: AtomicU32,
    /// The space that the block belongs to.
    pub space: AtomicU16,
    /// How many bytes fewer were asked for, where somebody wants to know.
    pub waste: AtomicU32,
    /// Tells the lives of a block apart.
    pub serial: AtomicU32,
    kept: AtomicU8,
    special: AtomicU8,
}

impl Block {
    #[inline]
    pub fn state(&self) -> State {
        match self.kept.load(Acquire) {
            FREE => State::Free,
            USED if cell(self.addr.load(Relaxed)).load(Acquire) & entry::CACHED != 0 => State::Cached,
            USED => State::Live,
            _ => State::Vacant,
        }
    }
    pub fn is_free(&self) -> bool {
        self.kept.load(Acquire) == FREE
    }
    /// It is in no use any more, nor found by its address.
    pub fn set_free(&self) {
        self.kept.store(FREE, Release);
    }
    pub fn set_vacant(&self) {
        self.kept.store(VACANT, Release);
    }
    /// A block in use is kept by its holder, or given to the program.
    pub fn set_cached(&self, cached: bool) {
        entry::set_cached(cell(self.addr.load(Relaxed)), cached);
    }
    /// For whoever keeps blocks whole: the bin, plus one; 0 is none. Of a block in use.
    pub fn bin(&self) -> usize {
        entry::bin(cell(self.addr.load(Relaxed)).load(Relaxed))
    }
    /// The block is in use, and nobody else's yet.
    pub fn set_bin(&self, bin: usize) {
        let cell = cell(self.addr.load(Relaxed));
        if bin < entry::BINS as usize {
            cell.store(cell.load(Relaxed) & !entry::BINS | bin as u64, Release);
        }
    }
    /// Anything but 0: the block is not as others, and its free goes the long way.
    #[inline]
    pub fn special(&self) -> u8 {
        self.special.load(Acquire)
    }
    /// More that is special about a block in use. (Should its holder keep it at this moment, it may go the short way once more.)
    pub fn add_special(&self, more: u8) {
        self.special.fetch_or(more, Release);
        cell(self.addr.load(Relaxed)).fetch_or(entry::SPECIAL, Release);
    }
    /// A block in use is as others again.
    pub fn clear_special(&self) {
        if self.special.swap(0, Release) != 0 {
            cell(self.addr.load(Relaxed)).fetch_and(!entry::SPECIAL, Release);
        }
    }
}

/// What the table says of a block in use, in one word; 0: nothing starts there.
pub mod entry {
    use super::{AtomicU64, BlockId, Relaxed, Release};

    /// The bin, plus one.
    pub const BINS: u64 = 0xffff;
    const SPACE: u32 = 16;
    /// Bits 9 to 11 of the address, which tell it from others in the same unit.
    const START: u32 = 32;
    pub const SPECIAL: u64 = 1 << 35;
    pub const CACHED: u64 = 1 << 36;
    const ID: u32 = 38;

    pub fn of(b: BlockId, addr: u64, space: u16) -> u64 {
        u64::from(b) << ID | live(addr, expected(space))
    }
    /// What is the same in the entries of all live blocks of a space that are as others.
    pub fn expected(space: u16) -> u64 {
        u64::from(space) << SPACE
    }
    fn live(addr: u64, expected: u64) -> u64 {
        expected | (addr >> 9 & 7) << START
    }
    /// Whether it is of the live block that starts at `addr`, in the space of `expected`, and is not special.
    #[inline(always)]
    pub fn is_plain(e: u64, addr: u64, expected: u64) -> bool {
        let rest = (1 << ID) - 1 - BINS;
        addr & 511 == 0 && e & rest == live(addr, expected)
    }
    #[inline]
    pub fn block(e: u64) -> BlockId {
        (e >> ID) as BlockId
    }
    #[inline]
    pub fn bin(e: u64) -> usize {
        (e & BINS) as usize
    }
    /// By whoever holds the block: nobody else writes meanwhile, but for `SPECIAL`.
    #[inline]
    pub fn set_cached(cell: &AtomicU64, cached: bool) {
        let e = cell.load(Relaxed);
        cell.store(if cached { e | CACHED } else { e & !CACHED }, Release);
    }
}

/// Records that can be reserved: 64 bytes each. Twice as many as a device of 256 GiB has blocks of 8 KiB.
const MAX_BLOCKS: usize = 1 << 26;
/// 48-bit addresses in slots of 2 MiB.
const SLOT_BITS: u32 = 21;
const SLOTS: usize = 1 << (48 - SLOT_BITS);

/// How far apart blocks in use start: what one entry of a leaf is for. The numbers are powers of two.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u64)]
pub enum Grain {
    Granule = 9,
    /// 4 KiB and more.
    Page = 12,
    /// As it comes: the table finds out. Only for blocks that are in no bin, and in slots of one space.
    Any = 18,
}

struct Table {
    capacity: usize,
    /// Address of the slot's leaf, plus its grain; 0: none.
    slots: *const AtomicU64,
    used: AtomicU32,
    spare: Mutex<Vec<BlockId>>,
    /// Held by whoever makes a leaf.
    making: Mutex<()>,
}

/// A part of a leaf. Aligned so that the leaf's grain fits in its address.
#[repr(align(64))]
struct Line {
    _entries: [AtomicU64; 8],
}

// SAFETY: the pointers are to memory mapped for the life of the process, made of atomics.
unsafe impl Sync for Table {}
// SAFETY: as above; no thread owns the memory.
unsafe impl Send for Table {}

/// The two arrays again, for who must not pass through `Lazy`: NULL before the first space.
static BLOCKS: AtomicPtr<Block> = AtomicPtr::new(std::ptr::null_mut());
static LEAVES: AtomicPtr<AtomicU64> = AtomicPtr::new(std::ptr::null_mut());

static TABLE: Lazy<Option<Table>> = Lazy::new(|| {
    let slots = reserve(SLOTS * size_of::<AtomicU64>())?;
    // A process whose address space is limited gets fewer.
    let sizes = std::iter::successors(Some(MAX_BLOCKS), |n| Some(n / 2)).take_while(|&n| n >= 1 << 14);
    let (blocks, capacity) = sizes.into_iter().find_map(|n| Some((reserve(n * size_of::<Block>())?, n)))?;
    BLOCKS.store(blocks as *mut Block, Release);
    LEAVES.store(slots as *mut AtomicU64, Release);
    Some(Table {
        capacity,
        slots: slots.cast(),
        used: AtomicU32::new(1),
        spare: Mutex::default(),
        making: Mutex::default(),
    })
});

/// Zeroed memory of which only what is touched counts.
fn reserve(bytes: usize) -> Option<*const u8> {
    let (prot, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
    // SAFETY: a fresh anonymous mapping, wherever the system has room.
    let p = unsafe { libc::mmap(std::ptr::null_mut(), bytes, prot, flags, -1, 0) };
    if p == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the mapping just made. Huge pages would back what was never touched; refusal changes nothing else.
    unsafe { libc::madvise(p, bytes, libc::MADV_NOHUGEPAGE) };
    Some(p as *const u8)
}

/// Whether the process has room for the table; without it there is no pool.
pub fn available() -> bool {
    TABLE.is_some()
}

/// Whether blocks at these addresses can be found again.
pub fn covers(base: u64, size: usize) -> bool {
    base.checked_add(size as u64).is_some_and(|end| end <= 1 << 48)
}

#[inline]
fn table() -> &'static Table {
    // A space is made only where the table is available.
    TABLE.as_ref().expect("a block is asked for without a table")
}

/// The record `b`.
#[inline]
pub fn block(b: BlockId) -> &'static Block {
    // SAFETY: an id is handed out by the table, below its capacity, and the records are mapped for the life of the process.
    unsafe { &*BLOCKS.load(Relaxed).add(b as usize) }
}

/// A vacant record. None when all are in use.
pub fn new_block() -> Option<BlockId> {
    let t = table();
    if let Some(b) = t.spare.lock().pop() {
        return Some(b);
    }
    let b = t.used.fetch_add(1, Relaxed);
    if (b as usize) < t.capacity {
        return Some(b);
    }
    t.used.fetch_sub(1, Relaxed);
    None
}

/// Records go back, vacant.
pub fn give_back(blocks: &mut Vec<BlockId>) {
    table().spare.lock().append(blocks);
}

/// The block in use that starts exactly at `addr`, whatever space it belongs to.
#[inline]
pub fn find(addr: u64) -> Option<(BlockId, &'static Block)> {
    let b = entry::block(at(addr)?.load(Acquire));
    let record = block(b);
    (b != NIL && record.addr.load(Relaxed) == addr).then_some((b, record))
}

/// The entry for the unit of addresses that holds `addr`: any address at all.
#[inline(always)]
pub fn at(addr: u64) -> Option<&'static AtomicU64> {
    // Not before the first pool: a foreign pointer must not make a table.
    let slots = LEAVES.load(Acquire);
    let slot = (addr >> SLOT_BITS) as usize;
    if slots.is_null() || slot >= SLOTS {
        return None;
    }
    // SAFETY: within the table, which is mapped for the life of the process.
    let leaf = unsafe { &*slots.add(slot) }.load(Acquire);
    (leaf != 0).then(|| in_leaf(leaf, addr))
}

#[inline(always)]
fn in_leaf(leaf: u64, addr: u64) -> &'static AtomicU64 {
    let i = (addr & ((1 << SLOT_BITS) - 1)) >> (leaf & 63);
    // SAFETY: a leaf has an entry for every unit of its slot and is never freed.
    unsafe { &*((leaf & !63) as *const AtomicU64).add(i as usize) }
}

/// Makes leaves for addresses that a space takes in.
pub fn cover(base: u64, size: usize, grain: Grain) {
    for slot in base >> SLOT_BITS..=(base + size as u64 - 1) >> SLOT_BITS {
        refine(slot, grain);
    }
}

/// Gives a slot a leaf of `grain` or finer. What the old one said is copied: no block there may be in a bin, or none be in use. The old
/// leaf stays, for who is reading it.
fn refine(slot: u64, grain: Grain) {
    let t = table();
    // SAFETY: `covers` was asked: within the table.
    let place = unsafe { &*t.slots.add(slot as usize) };
    let _making = t.making.lock();
    let now = place.load(Acquire);
    if now != 0 && now & 63 <= grain as u64 {
        return;
    }
    let lines = 1usize << (SLOT_BITS - grain as u32 - 3);
    let line = || Line { _entries: Default::default() };
    let leaf: &'static [Line] = Box::leak((0..lines).map(|_| line()).collect());
    let leaf = leaf.as_ptr() as u64 | grain as u64;
    if now != 0 {
        for unit in 0..1 << (SLOT_BITS as u64 - (now & 63)) {
            let e = in_leaf(now, unit << (now & 63)).load(Acquire);
            if e != 0 {
                in_leaf(leaf, block(entry::block(e)).addr.load(Relaxed)).store(e, Release);
            }
        }
    }
    place.store(leaf, Release);
}

/// The block `b` is in use and live, in no bin, and as others.
pub fn publish(b: BlockId) {
    let record = block(b);
    let addr = record.addr.load(Relaxed);
    for finer in [Some(Grain::Page), Some(Grain::Granule), None] {
        let there = cell(addr);
        let other = entry::block(there.load(Relaxed));
        if other == NIL || other == b {
            there.store(entry::of(b, addr, record.space.load(Relaxed)), Release);
            break;
        }
        // Another block starts in the same unit.
        finer.into_iter().for_each(|grain| refine(addr >> SLOT_BITS, grain));
    }
    record.special.store(0, Relaxed);
    record.kept.store(USED, Release);
}

/// No block in use starts at `addr`.
#[inline]
pub fn withdraw(addr: u64) {
    cell(addr).store(0, Release);
}

#[inline]
fn cell(addr: u64) -> &'static AtomicU64 {
    // SAFETY: the address was covered.
    let leaf = unsafe { &*table().slots.add((addr >> SLOT_BITS) as usize) }.load(Acquire);
    in_leaf(leaf, addr)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn used(at: u64) -> BlockId {
        let b = new_block().unwrap();
        block(b).addr.store(at, Relaxed);
        // The record may have been another test's, and its space's.
        block(b).space.store(0, Relaxed);
        publish(b);
        b
    }

    #[test]
    fn blocks_are_found_by_their_start_alone() {
        // Addresses that no other test uses.
        let base = 0x7a00_0000_0000;
        assert!(find(base).is_none());
        cover(base, 4 << 20, Grain::Page);
        let b = used(base + 8192);
        assert_eq!(find(base + 8192).map(|f| f.0), Some(b));
        assert!(find(base + 8192 + 512).is_none() && find(base).is_none() && find(base + (3 << 20)).is_none());
        withdraw(base + 8192);
        assert!(find(base + 8192).is_none());
        // The slot turns fine: starts 512 bytes apart are told apart.
        cover(base, 2 << 20, Grain::Granule);
        publish(b);
        assert!(find(base + 8192 + 512).is_none());
        assert_eq!(find(base + 8192).map(|f| f.0), Some(b));
        withdraw(base + 8192);
        give_back(&mut vec![b]);
        for odd in [0, 1, u64::MAX, 1 << 48, (1 << 48) - 1] {
            assert!(find(odd).is_none());
        }
    }

    #[test]
    fn a_leaf_becomes_as_fine_as_its_blocks() {
        let base = 0x7a10_0000_0000;
        cover(base, 2 << 20, Grain::Any);
        let offsets = [0u64, 1 << 20, (1 << 20) + 8192, (1 << 20) + 8192 + 512, 512, (2 << 20) - 512];
        let mut all: Vec<BlockId> = Vec::new();
        for at in offsets {
            all.push(used(base + at));
            for (&b, at) in all.iter().zip(offsets) {
                assert_eq!(find(base + at).map(|f| f.0), Some(b), "{at}");
                assert_eq!(block(b).state(), State::Live);
            }
        }
        block(all[2]).set_cached(true);
        let states: Vec<_> = all.iter().map(|&b| block(b).state() == State::Cached).collect();
        assert_eq!(states, [false, false, true, false, false, false]);
        for at in offsets {
            withdraw(base + at);
            assert!(find(base + at).is_none());
        }
        give_back(&mut all);
    }

    #[test]
    fn an_entry_tells_a_plain_live_block_from_everything_else() {
        let (base, mine) = (0x7a20_0000_0000, entry::expected(0));
        cover(base, 2 << 20, Grain::Page);
        let addr = base + 8192 + 1536;
        let b = used(addr);
        block(b).set_bin(7);
        let e = || at(addr).unwrap().load(Relaxed);
        assert!(entry::is_plain(e(), addr, mine));
        assert_eq!((entry::block(e()), entry::bin(e()), block(b).bin()), (b, 7, 7));
        for wrong in [addr + 1, addr + 256, addr + 512, addr - 512, addr & !4095] {
            assert!(!entry::is_plain(e(), wrong, mine), "{wrong:#x}");
        }
        assert!(!entry::is_plain(e(), addr, entry::expected(1)), "of another space");
        block(b).set_cached(true);
        assert!(!entry::is_plain(e(), addr, mine), "cached");
        block(b).set_cached(false);
        block(b).add_special(4);
        assert!(!entry::is_plain(e(), addr, mine) && block(b).special() == 4, "special");
        block(b).clear_special();
        assert!(entry::is_plain(e(), addr, mine) && entry::bin(e()) == 7);
        withdraw(addr);
        assert!(!entry::is_plain(e(), addr, mine), "freed");
        give_back(&mut vec![b]);
    }
}
