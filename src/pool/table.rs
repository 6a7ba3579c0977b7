//! Pointer to block, without a lock or a hash: block records at addresses that never move, and a flat table over device
//! addresses that names the block that starts there.
//!
//! ```text
//! address >> 21  ->  leaf  ->  (address in the slot) >> 12 or 9  ->  record  ->  does it start at this very address?
//! ```
//! The table and the records lie in reserved address space, of which the system backs only what is touched. A leaf has an entry for
//! every 4 KiB where no block is smaller (0.1 % of the device memory it covers), for every 512 bytes elsewhere (0.8 %).
//!
//! Who may write what: the table and a record's fields are written under the lock of the space that owns the address, but for
//! `state` of a block in use, which whoever holds the block may turn from live to cached and back. Anybody may read at any time;
//! leaves and records are never unmapped, so a stale read finds a record that does not match.

use std::sync::atomic::{
    AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};

use once_cell::sync::Lazy;
use parking_lot::Mutex;

/// Names a block record of the process; reused after the block is merged away. 0 names none.
pub type BlockId = u32;
pub const NIL: BlockId = 0;

/// What a block is; the numbers are `Block::state`'s.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum State {
    /// The record is unused.
    Vacant = 0,
    /// In its owner's free index.
    Free = 1,
    /// In use by the program.
    Live = 2,
    /// Freed by the program and kept whole, in a bin or a magazine: neither free space nor live.
    Cached = 3,
}

impl State {
    fn of(n: u8) -> State {
        match n {
            1 => State::Free,
            2 => State::Live,
            3 => State::Cached,
            _ => State::Vacant,
        }
    }
}

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
    /// For whoever keeps blocks whole: the bin, plus one; 0 is none.
    pub bin: AtomicU16,
    /// How many bytes fewer were asked for, where somebody wants to know.
    pub waste: AtomicU32,
    /// Tells the lives of a block apart.
    pub serial: AtomicU32,
    state: AtomicU8,
    /// Anything but 0: the block is not as others, and its free goes the long way.
    pub special: AtomicU8,
}

impl Block {
    #[inline]
    pub fn state(&self) -> State {
        State::of(self.state.load(Acquire))
    }
    #[inline]
    pub fn set_state(&self, s: State) {
        self.state.store(s as u8, Release);
    }
}

/// Records that can be reserved: 64 bytes each. Twice as many as a device of 256 GiB has blocks of 8 KiB.
const MAX_BLOCKS: usize = 1 << 26;
/// 48-bit addresses in slots of 2 MiB.
const SLOT_BITS: u32 = 21;
const SLOTS: usize = 1 << (48 - SLOT_BITS);
const COARSE: u32 = 12;
const FINE: u32 = 9;

struct Table {
    capacity: usize,
    /// Address of the slot's leaf, plus 1 for a fine one; 0: none.
    slots: *const AtomicU64,
    used: AtomicU32,
    spare: Mutex<Vec<BlockId>>,
    /// Leaves of slots that changed their kind, for the next of their own: coarse, fine.
    leaves: Mutex<[Vec<u64>; 2]>,
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
    let (spare, leaves) = (Mutex::default(), Mutex::default());
    BLOCKS.store(blocks as *mut Block, Release);
    LEAVES.store(slots as *mut AtomicU64, Release);
    Some(Table { capacity, slots: slots.cast(), used: AtomicU32::new(1), spare, leaves })
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
    // Not before the first pool: a foreign pointer must not make a table.
    let slots = LEAVES.load(Acquire);
    let slot = (addr >> SLOT_BITS) as usize;
    if slots.is_null() || slot >= SLOTS {
        return None;
    }
    // SAFETY: within the table, which is mapped for the life of the process.
    let leaf = unsafe { &*slots.add(slot) }.load(Acquire);
    if leaf == 0 {
        return None;
    }
    let b = entry(leaf, addr).load(Acquire);
    if b == NIL {
        return None;
    }
    let record = block(b);
    (record.addr.load(Relaxed) == addr).then_some((b, record))
}

#[inline]
fn entry(leaf: u64, addr: u64) -> &'static AtomicU32 {
    let shift = if leaf & 1 != 0 { FINE } else { COARSE };
    let i = (addr & ((1 << SLOT_BITS) - 1)) >> shift;
    // SAFETY: a leaf has an entry for every unit of its slot and is never freed.
    unsafe { &*((leaf & !1) as *const AtomicU32).add(i as usize) }
}

/// Makes leaves for addresses that a space takes in. `fine`: blocks there may be smaller than 4 KiB.
pub fn cover(base: u64, size: usize, fine: bool) {
    let t = table();
    for slot in base >> SLOT_BITS..=(base + size as u64 - 1) >> SLOT_BITS {
        // SAFETY: `covers` was asked: within the table.
        let cell = unsafe { &*t.slots.add(slot as usize) };
        let mut leaves = t.leaves.lock();
        let now = cell.load(Acquire);
        // A fine leaf serves large blocks as well; slots that two segments share are fine from the first.
        if now != 0 && (now & 1 != 0 || !fine) {
            continue;
        }
        let units = 1usize << (SLOT_BITS - if fine { FINE } else { COARSE });
        let leaf = leaves[usize::from(fine)].pop().unwrap_or_else(|| {
            let cells: Box<[AtomicU32]> = (0..units).map(|_| AtomicU32::new(NIL)).collect();
            Box::leak(cells).as_ptr() as u64 | u64::from(fine)
        });
        cell.store(leaf, Release);
        if now != 0 {
            leaves[0].push(now);
        }
    }
}

/// The block `b` starts at `addr`, and is in use.
#[inline]
pub fn publish(addr: u64, b: BlockId) {
    cell(addr).store(b, Release);
}

/// No block in use starts at `addr`.
#[inline]
pub fn withdraw(addr: u64) {
    cell(addr).store(NIL, Release);
}

#[inline]
fn cell(addr: u64) -> &'static AtomicU32 {
    // SAFETY: the address was covered.
    let leaf = unsafe { &*table().slots.add((addr >> SLOT_BITS) as usize) }.load(Acquire);
    entry(leaf, addr)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_found_by_their_start_alone() {
        // Addresses that no other test uses.
        let base = 0x7a00_0000_0000;
        assert!(find(base).is_none());
        cover(base, 4 << 20, false);
        let b = new_block().unwrap();
        block(b).addr.store(base + 8192, Relaxed);
        publish(base + 8192, b);
        assert_eq!(find(base + 8192).map(|f| f.0), Some(b));
        assert!(find(base + 8192 + 512).is_none() && find(base).is_none() && find(base + (3 << 20)).is_none());
        withdraw(base + 8192);
        assert!(find(base + 8192).is_none());
        // The slot turns fine: starts 512 bytes apart are told apart.
        cover(base, 2 << 20, true);
        publish(base + 8192, b);
        assert!(find(base + 8192 + 512).is_none());
        assert_eq!(find(base + 8192).map(|f| f.0), Some(b));
        withdraw(base + 8192);
        give_back(&mut vec![b]);
        for odd in [0, 1, u64::MAX, 1 << 48, (1 << 48) - 1] {
            assert!(find(odd).is_none());
        }
    }
}
