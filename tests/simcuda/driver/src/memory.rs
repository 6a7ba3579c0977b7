//! Plain device memory and managed memory.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::backing::{self, Extent, PAGE};
use crate::call::driver_fns;
use crate::capture;
use crate::codes::*;
use crate::context::current;
use crate::device::check;
use crate::engine::{self, Op};
use crate::state::{State, state};
use crate::stream::Null;

pub const CPU_DEVICE: c_int = -1;
const LARGE: u64 = 2 << 20;
const PITCH: usize = 512;

#[derive(Copy, Clone, PartialEq, Eq)]
pub enum Kind {
    Device,
    /// From `cuMemAllocAsync`, of this pool.
    Pooled(usize),
    /// `resident` bytes count as the device's memory: those that were prefetched to it.
    Managed {
        resident: u64,
    },
    Pinned {
        flags: u32,
    },
    Registered {
        flags: u32,
    },
    /// Opened from another process's handle: the owner's process and the offset in its device's file.
    Imported {
        owner: (i32, u64),
        references: u32,
    },
}

pub struct Allocation {
    pub base: u64,
    /// As asked for; the host's mapping is whole pages.
    pub size: usize,
    pub device: i32,
    pub context: usize,
    pub kind: Kind,
    /// None for memory of the host.
    pub extent: Option<Extent>,
    pub buffer_id: u64,
    pub sync_memops: bool,
}

impl Allocation {
    pub fn is_host(&self) -> bool {
        matches!(self.kind, Kind::Pinned { .. } | Kind::Registered { .. })
    }

    /// Whether `cuMemFree` and `cuMemFreeAsync` take it.
    fn is_freeable(&self) -> bool {
        matches!(self.kind, Kind::Device | Kind::Pooled(_) | Kind::Managed { .. })
    }

    fn counted(&self) -> u64 {
        match self.kind {
            Kind::Managed { resident } => resident,
            Kind::Device | Kind::Pooled(_) => self.extent.as_ref().map_or(0, |extent| extent.bytes),
            _ => 0,
        }
    }
}

/// Memory that the program no longer owns, and that work may still use until it is released.
pub struct Freed {
    allocation: Allocation,
    released: AtomicBool,
    /// Whether it waits in a stream.
    queued: bool,
}

impl Freed {
    pub fn new(allocation: Allocation, queued: bool) -> Freed {
        Freed { allocation, released: AtomicBool::new(false), queued }
    }

    /// Unmaps it and gives its memory back; once only. The state's lock must not be held.
    pub fn release(&self) {
        if !self.released.swap(true, Ordering::AcqRel) {
            // Slow for large memory, hence without the lock: until the books say so, the addresses are nobody else's.
            self.unmap();
            self.settle(&mut state());
        }
    }

    fn unmap(&self) {
        let allocation = &self.allocation;
        if let Some(extent) = &allocation.extent {
            backing::vacate(allocation.base, extent.bytes);
            if !matches!(allocation.kind, Kind::Imported { .. }) {
                extent.discard();
            }
        } else if let Kind::Pinned { .. } = allocation.kind {
            backing::unreserve(allocation.base, (allocation.size as u64).next_multiple_of(PAGE));
        }
    }

    fn settle(&self, st: &mut State) {
        let allocation = &self.allocation;
        if let Some(extent) = &allocation.extent {
            st.arena.give(allocation.base, extent.bytes);
            let device = st.device(allocation.device);
            device.used -= allocation.counted();
            device.frees_pending -= self.queued as usize;
        }
        if let Kind::Pooled(pool) = allocation.kind
            && let Some(pool) = st.pools.get_mut(pool)
        {
            pool.used -= allocation.counted();
        }
    }
}

impl State {
    /// Maps an extent at the lowest free addresses and keeps the books.
    pub fn place(&mut self, extent: Extent, size: usize, device: i32, context: usize, kind: Kind) -> CuResult<u64> {
        let align = if extent.bytes >= LARGE { LARGE } else { PAGE };
        let base = self.arena.take(extent.bytes, align).ok_or(OUT_OF_MEMORY)?;
        if !extent.map_at(base, libc::PROT_READ | libc::PROT_WRITE) {
            self.arena.give(base, extent.bytes);
            return Err(OUT_OF_MEMORY);
        }
        let buffer_id = self.buffer_id();
        let extent = Some(extent);
        self.allocations
            .insert(base, Allocation { base, size, device, context, kind, extent, buffer_id, sync_memops: false });
        Ok(base)
    }

    /// Device memory for the current context's device.
    pub fn allocate(&mut self, size: usize, device: i32, kind: Kind) -> CuResult<u64> {
        let context = current()?;
        let bytes = (size as u64).checked_next_multiple_of(PAGE).ok_or(OUT_OF_MEMORY)?;
        let extent = match kind {
            Kind::Managed { .. } if bytes > 1 << 40 => return Err(OUT_OF_MEMORY),
            Kind::Managed { .. } => self.device(device).unaccounted(bytes, PAGE),
            _ => self.device(device).take(bytes, PAGE)?,
        };
        let placed = self.place(extent, size, device, context, kind);
        if placed.is_err() && !matches!(kind, Kind::Managed { .. }) {
            self.device(device).used -= bytes;
        }
        placed
    }

    /// Takes an allocation out of the books by its exact base; 1 when there is none that may be freed.
    pub fn detach(&mut self, base: u64) -> CuResult<Allocation> {
        match self.allocations.get(&base) {
            Some(found) if found.is_freeable() => Ok(self.allocations.remove(&base).expect("just found")),
            _ => Err(INVALID_VALUE),
        }
    }
}

/// All memory of a context that is no more. Its work is complete.
pub fn release_context(st: &mut State, context: usize) {
    let bases: Vec<u64> = st.allocations.values().filter(|a| a.context == context).map(|a| a.base).collect();
    for base in bases {
        let allocation = st.allocations.remove(&base).expect("just listed");
        if let Kind::Imported { owner, .. } = allocation.kind {
            st.imports.remove(&owner);
        }
        let freed = Freed::new(allocation, false);
        freed.unmap();
        freed.settle(st);
    }
}

driver_fns! {
    fn cuMemAlloc_v2(ptr: *mut u64, bytes: usize) {
        allocate(ptr, bytes, Kind::Device)
    }

    fn cuMemAllocManaged(ptr: *mut u64, bytes: usize, flags: u32) {
        if flags != 1 && flags != 2 {
            return Err(INVALID_VALUE);
        }
        allocate(ptr, bytes, Kind::Managed { resident: 0 })
    }

    fn cuMemAllocPitch_v2(ptr: *mut u64, pitch: *mut usize, width: usize, height: usize, element: u32) {
        if !matches!(element, 4 | 8 | 16) || pitch.is_null() {
            return Err(INVALID_VALUE);
        }
        let row = width.checked_next_multiple_of(PITCH).ok_or(OUT_OF_MEMORY)?;
        allocate(ptr, row.checked_mul(height).ok_or(OUT_OF_MEMORY)?, Kind::Device)?;
        write(pitch, row)
    }

    /// Waits for all work on the device, then frees.
    fn cuMemFree_v2(ptr: u64) {
        if ptr == 0 {
            return Ok(());
        }
        let mut st = state();
        st.current()?;
        capture::refuse_unsafe(&st)?;
        let allocation = st.detach(ptr)?;
        let deps = st.device_pending(allocation.device);
        drop(st);
        engine::wait_all(&deps);
        Freed::new(allocation, false).release();
        Ok(())
    }

    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let mut st = state();
        let ordinal = st.current()?.device;
        let device = st.device(ordinal);
        write_optional(free, (device.total - device.used) as usize);
        write_optional(total, device.total as usize);
        Ok(())
    }

    fn cuMemGetAddressRange_v2(base: *mut u64, size: *mut usize, ptr: u64) {
        let mut st = state();
        st.current()?;
        let (start, bytes) = match st.allocation(ptr) {
            Some(found) => (found.base, found.size),
            None => st.vmm.mapping(ptr).map(|(base, mapping)| (base, mapping.bytes as usize)).ok_or(NOT_FOUND)?,
        };
        write_optional(base, start);
        write_optional(size, bytes);
        Ok(())
    }

    fn cuMemPrefetchAsync | cuMemPrefetchAsync_ptsz(ptr: u64, bytes: usize, device: c_int, stream: usize), null => {
        prefetch(ptr, bytes, (device != CPU_DEVICE).then_some(device), stream, null)
    }

    fn cuMemPrefetchAsync_v2 | cuMemPrefetchAsync_v2_ptsz(
        ptr: u64, bytes: usize, location: MemLocation, _flags: u32, stream: usize,
    ), null => {
        let device = match location.kind {
            MemLocation::DEVICE => Some(location.id),
            MemLocation::HOST | MemLocation::HOST_NUMA | MemLocation::HOST_NUMA_CURRENT => None,
            _ => return Err(INVALID_VALUE),
        };
        prefetch(ptr, bytes, device, stream, null)
    }

    fn cuMemAdvise(ptr: u64, bytes: usize, advice: c_int, _device: c_int) {
        advise(ptr, bytes, advice)
    }

    fn cuMemAdvise_v2(ptr: u64, bytes: usize, advice: c_int, _location: MemLocation) {
        advise(ptr, bytes, advice)
    }
}

fn allocate(ptr: *mut u64, bytes: usize, kind: Kind) -> Answer {
    let mut st = state();
    let device = st.current()?.device;
    write(ptr, 0)?;
    if bytes == 0 {
        return Err(INVALID_VALUE);
    }
    capture::refuse_unsafe(&st)?;
    let base = st.allocate(bytes, device, kind)?;
    write(ptr, base)
}

/// Whether a range lies in one managed allocation.
fn check_managed(st: &State, ptr: u64, bytes: usize) -> Answer {
    let found = st.allocation(ptr).ok_or(INVALID_VALUE)?;
    let fits = bytes > 0 && bytes as u64 <= found.base + found.size as u64 - ptr;
    if fits && matches!(found.kind, Kind::Managed { .. }) { Ok(()) } else { Err(INVALID_VALUE) }
}

/// Prefetching makes memory resident on its allocation's own device, as far as there is room. Which bytes is not kept, only
/// how many at most.
fn prefetch(ptr: u64, bytes: usize, device: Option<c_int>, stream: usize, null: Null) -> Answer {
    if let Some(device) = device {
        check(device)?;
    }
    let mut st = state();
    let stream = st.stream(stream, null)?;
    check_managed(&st, ptr, bytes)?;
    st.submit(&stream, Op::Marker(None))?;
    let found = st.allocation(ptr).expect("just checked");
    let (base, home, before) = (found.base, found.device, found.counted());
    let wanted = match device {
        Some(ordinal) if ordinal == home => before.max((bytes as u64).next_multiple_of(PAGE)),
        _ => before.saturating_sub((bytes as u64).next_multiple_of(PAGE)),
    };
    let owner = st.device(home);
    let after = wanted.min(before + (owner.total - owner.used));
    owner.used = owner.used - before + after;
    st.allocations.get_mut(&base).expect("just found").kind = Kind::Managed { resident: after };
    Ok(())
}

fn advise(ptr: u64, bytes: usize, advice: c_int) -> Answer {
    let mut st = state();
    st.current()?;
    if !(1..=6).contains(&advice) {
        return Err(INVALID_VALUE);
    }
    check_managed(&st, ptr, bytes)
}
