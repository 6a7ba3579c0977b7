//! Virtual memory management: address reservations, physical handles, and mappings of the one in the other.
//!
//! A reservation is address space that faults; a mapping is the handle's extent of its device's file, put there without access;
//! `cuMemSetAccess` makes it readable or writable. Use before access is set, or after the unmap, faults. A handle exported as
//! a descriptor is a fresh open file description of the device's file, whose file position tells the extent: offset and, in
//! the bits under the granularity, size in units of it. An extent that was exported is never given back to the host: another
//! process may map it.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd};
use std::sync::Arc;

use crate::backing::{self, DeviceFile, Extent};
use crate::call::driver_fns;
use crate::codes::*;
use crate::config;
use crate::device::check;
use crate::state::{State, state};

pub const GRANULARITY: u64 = 2 << 20;
const POSIX_FD: c_int = 1;
/// The most address space that one process can reserve (x86-64).
const ADDRESS_SPACE: usize = 1 << 47;

#[derive(Default)]
pub struct Vmm {
    pub reservations: BTreeMap<u64, u64>,
    pub mappings: BTreeMap<u64, Mapping>,
    pub handles: HashMap<u64, Physical>,
    next_handle: u64,
}

pub struct Mapping {
    pub bytes: u64,
    pub handle: u64,
    pub buffer_id: u64,
    pub sync_memops: bool,
    access: Vec<AccessDesc>,
}

pub struct Physical {
    pub location: MemLocation,
    pub handle_types: c_int,
    pub rdma_capable: bool,
    extent: Extent,
    /// Whether it counts as its device's memory: not so on the host, nor when another process owns it.
    counted: bool,
    /// Whether another process may map it.
    exported: bool,
    references: u32,
    mappings: u32,
}

impl Vmm {
    /// The mapping that an address lies in, and its base.
    pub fn mapping(&self, address: u64) -> Option<(u64, &Mapping)> {
        let (&base, mapping) = self.mappings.range(..=address).next_back()?;
        (address - base < mapping.bytes).then_some((base, mapping))
    }

    pub fn mapping_mut(&mut self, address: u64) -> Option<&mut Mapping> {
        let (base, _) = self.mapping(address)?;
        self.mappings.get_mut(&base)
    }

    fn insert(&mut self, physical: Physical) -> u64 {
        self.next_handle += 1;
        let handle = 0x6000_0000_0000 + self.next_handle * 16;
        self.handles.insert(handle, physical);
        handle
    }

    /// The bases of the mappings that make up a range, whole and without gaps; 1 when it is not made of such.
    fn covering(&self, start: u64, bytes: u64) -> CuResult<Vec<u64>> {
        let mut bases = Vec::new();
        let mut next = start;
        for (&base, mapping) in self.mappings.range(start..start.saturating_add(bytes)) {
            if base != next {
                return Err(INVALID_VALUE);
            }
            bases.push(base);
            next += mapping.bytes;
        }
        if bytes > 0 && next == start + bytes { Ok(bases) } else { Err(INVALID_VALUE) }
    }

    fn reserved(&self, start: u64, bytes: u64) -> bool {
        let found = self.reservations.range(..=start).next_back();
        found.is_some_and(|(&base, &size)| start.checked_add(bytes).is_some_and(|end| end <= base + size))
    }

    fn is_mapped(&self, start: u64, bytes: u64) -> bool {
        let last = self.mappings.range(..start + bytes).next_back();
        last.is_some_and(|(&base, mapping)| base + mapping.bytes > start)
    }
}

/// Closes the books of a handle that nothing refers to any more. What it gives is then to be discarded, which takes a while
/// for large pages and is done without the state's lock.
fn settle(st: &mut State, handle: u64) -> Option<Extent> {
    let physical = &st.vmm.handles[&handle];
    if physical.references > 0 || physical.mappings > 0 {
        return None;
    }
    let physical = st.vmm.handles.remove(&handle).expect("just found");
    if physical.counted {
        st.device(physical.location.id).used -= physical.extent.bytes;
    }
    (!physical.exported).then_some(physical.extent)
}

fn supported() -> Answer {
    if config::get().vmm { Ok(()) } else { Err(NOT_SUPPORTED) }
}

fn check_prop(prop: *const AllocationProp) -> CuResult<AllocationProp> {
    let prop = read(prop)?;
    if prop.kind != 1 || prop.handle_types & !POSIX_FD != 0 {
        return Err(INVALID_VALUE);
    }
    match prop.location.kind {
        MemLocation::DEVICE => check(prop.location.id)?,
        MemLocation::HOST => {}
        MemLocation::HOST_NUMA if prop.location.id == 0 => {}
        MemLocation::HOST_NUMA_CURRENT => {}
        _ => return Err(INVALID_VALUE),
    }
    Ok(prop)
}

driver_fns! {
    fn cuMemGetAllocationGranularity(granularity: *mut usize, prop: *const AllocationProp, option: c_int) {
        supported()?;
        check_prop(prop)?;
        if option & !1 != 0 {
            return Err(INVALID_VALUE);
        }
        write(granularity, GRANULARITY as usize)
    }

    fn cuMemAddressReserve(ptr: *mut u64, bytes: usize, alignment: usize, hint: u64, flags: u64) {
        supported()?;
        if ptr.is_null() || bytes == 0 || !(bytes as u64).is_multiple_of(GRANULARITY) || flags != 0 {
            return Err(INVALID_VALUE);
        }
        if alignment != 0 && !alignment.is_power_of_two() {
            return Err(INVALID_VALUE);
        }
        if bytes > ADDRESS_SPACE || alignment > ADDRESS_SPACE {
            return Err(OUT_OF_MEMORY);
        }
        let base = backing::reserve(bytes, alignment.max(GRANULARITY as usize), hint).ok_or(OUT_OF_MEMORY)?;
        state().vmm.reservations.insert(base, bytes as u64);
        write(ptr, base)
    }

    fn cuMemAddressFree(ptr: u64, bytes: usize) {
        supported()?;
        let mut st = state();
        if st.vmm.reservations.get(&ptr) != Some(&(bytes as u64)) || st.vmm.is_mapped(ptr, bytes as u64) {
            return Err(INVALID_VALUE);
        }
        st.vmm.reservations.remove(&ptr);
        backing::unreserve(ptr, bytes as u64);
        Ok(())
    }

    fn cuMemCreate(handle: *mut u64, bytes: usize, prop: *const AllocationProp, flags: u64) {
        supported()?;
        let prop = check_prop(prop)?;
        if handle.is_null() || bytes == 0 || !(bytes as u64).is_multiple_of(GRANULARITY) || flags != 0 {
            return Err(INVALID_VALUE);
        }
        let mut st = state();
        let counted = prop.location.kind == MemLocation::DEVICE;
        let extent = if counted {
            st.device(prop.location.id).take(bytes as u64, GRANULARITY)?
        } else {
            // Host memory lives in the first device's file; where it lies makes no difference.
            st.device(0).unaccounted(bytes as u64, GRANULARITY)
        };
        let new = st.vmm.insert(Physical {
            location: prop.location,
            handle_types: prop.handle_types,
            rdma_capable: prop.rdma_capable != 0,
            extent,
            counted,
            exported: false,
            references: 1,
            mappings: 0,
        });
        write(handle, new)
    }

    fn cuMemRelease(handle: u64) {
        supported()?;
        let mut st = state();
        let physical = st.vmm.handles.get_mut(&handle).filter(|physical| physical.references > 0).ok_or(INVALID_VALUE)?;
        physical.references -= 1;
        let idle = settle(&mut st, handle);
        drop(st);
        idle.iter().for_each(Extent::discard);
        Ok(())
    }

    fn cuMemMap(ptr: u64, bytes: usize, offset: usize, handle: u64, flags: u64) {
        supported()?;
        if offset != 0 {
            return Err(NOT_SUPPORTED);
        }
        let bytes = bytes as u64;
        if flags != 0 || bytes == 0 || !ptr.is_multiple_of(GRANULARITY) {
            return Err(INVALID_VALUE);
        }
        let mut st = state();
        let physical = st.vmm.handles.get(&handle).filter(|physical| physical.references > 0).ok_or(INVALID_VALUE)?;
        if bytes != physical.extent.bytes || !st.vmm.reserved(ptr, bytes) || st.vmm.is_mapped(ptr, bytes) {
            return Err(INVALID_VALUE);
        }
        if !physical.extent.map_at(ptr, libc::PROT_NONE) {
            return Err(OUT_OF_MEMORY);
        }
        st.vmm.handles.get_mut(&handle).expect("just found").mappings += 1;
        let buffer_id = st.buffer_id();
        st.vmm.mappings.insert(ptr, Mapping { bytes, handle, buffer_id, sync_memops: false, access: Vec::new() });
        Ok(())
    }

    /// A host act: it waits for no work. Work that still uses the range faults.
    fn cuMemUnmap(ptr: u64, bytes: usize) {
        supported()?;
        let mut st = state();
        let mut idle = Vec::new();
        for base in st.vmm.covering(ptr, bytes as u64)? {
            let mapping = st.vmm.mappings.remove(&base).expect("just listed");
            backing::vacate(base, mapping.bytes);
            st.vmm.handles.get_mut(&mapping.handle).expect("mapped, hence alive").mappings -= 1;
            idle.extend(settle(&mut st, mapping.handle));
        }
        drop(st);
        idle.iter().for_each(Extent::discard);
        Ok(())
    }

    fn cuMemSetAccess(ptr: u64, bytes: usize, descs: *const AccessDesc, count: usize) {
        supported()?;
        if descs.is_null() || count == 0 {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller vouches for `count` descriptions.
        let descs = unsafe { std::slice::from_raw_parts(descs, count) };
        for desc in descs {
            match desc.location.kind {
                MemLocation::DEVICE => check(desc.location.id)?,
                MemLocation::HOST | MemLocation::HOST_NUMA | MemLocation::HOST_NUMA_CURRENT => {}
                _ => return Err(INVALID_VALUE),
            }
            if !matches!(desc.flags, 0 | 1 | 3) {
                return Err(INVALID_VALUE);
            }
        }
        let mut st = state();
        for base in st.vmm.covering(ptr, bytes as u64)? {
            let mapping = st.vmm.mappings.get_mut(&base).expect("just listed");
            for desc in descs {
                mapping.access.retain(|old| old.location != desc.location);
                mapping.access.push(*desc);
            }
            protect(base, mapping);
        }
        Ok(())
    }

    fn cuMemGetAccess(flags: *mut u64, location: *const MemLocation, ptr: u64) {
        supported()?;
        let location = read(location)?;
        let st = state();
        let (_, mapping) = st.vmm.mapping(ptr).ok_or(INVALID_VALUE)?;
        let found = mapping.access.iter().find(|desc| desc.location == location);
        write(flags, found.map_or(0, |desc| desc.flags as u64))
    }

    fn cuMemRetainAllocationHandle(handle: *mut u64, address: *mut c_void) {
        supported()?;
        let mut st = state();
        let found = st.vmm.mapping(address as u64).ok_or(INVALID_VALUE)?.1.handle;
        write(handle, found)?;
        st.vmm.handles.get_mut(&found).expect("mapped, hence alive").references += 1;
        Ok(())
    }

    fn cuMemGetAllocationPropertiesFromHandle(prop: *mut AllocationProp, handle: u64) {
        supported()?;
        let st = state();
        let physical = st.vmm.handles.get(&handle).ok_or(INVALID_VALUE)?;
        write(prop, AllocationProp {
            kind: 1,
            handle_types: physical.handle_types,
            location: physical.location,
            win32: std::ptr::null_mut(),
            compression: 0,
            rdma_capable: physical.rdma_capable as u8,
            usage: 0,
            reserved: [0; 4],
        })
    }

    fn cuMemExportToShareableHandle(shareable: *mut c_void, handle: u64, kind: c_int, flags: u64) {
        supported()?;
        if shareable.is_null() || kind != POSIX_FD || flags != 0 {
            return Err(INVALID_VALUE);
        }
        let mut st = state();
        let physical = st.vmm.handles.get_mut(&handle).ok_or(INVALID_VALUE)?;
        if physical.handle_types & POSIX_FD == 0 {
            return Err(INVALID_VALUE);
        }
        let fd = physical.extent.file.reopen().ok_or(OPERATING_SYSTEM)?;
        let position = physical.extent.offset | (physical.extent.bytes / GRANULARITY);
        // SAFETY: seeks a descriptor of our own.
        if unsafe { libc::lseek(fd.as_raw_fd(), position as i64, libc::SEEK_SET) } < 0 {
            return Err(OPERATING_SYSTEM);
        }
        physical.exported = true;
        write(shareable.cast::<c_int>(), fd.into_raw_fd())
    }

    fn cuMemImportFromShareableHandle(handle: *mut u64, os_handle: *mut c_void, kind: c_int) {
        supported()?;
        if handle.is_null() || kind != POSIX_FD {
            return Err(INVALID_VALUE);
        }
        let given = os_handle as usize as c_int;
        if given < 0 {
            return Err(INVALID_VALUE);
        }
        // SAFETY: borrowed for the copy only; a number that is no descriptor makes the copy fail.
        let copy = unsafe { BorrowedFd::borrow_raw(given) }.try_clone_to_owned().map_err(|_| INVALID_VALUE)?;
        // SAFETY: asks a descriptor of our own, which shares its position with the one given.
        let position = unsafe { libc::lseek(copy.as_raw_fd(), 0, libc::SEEK_CUR) };
        let (file, ordinal) = DeviceFile::adopt(copy).ok_or(INVALID_VALUE)?;
        let (offset, units) = (position as u64 & !(GRANULARITY - 1), position as u64 & (GRANULARITY - 1));
        if position < 0 || units == 0 {
            return Err(INVALID_VALUE);
        }
        let mut st = state();
        let new = import(&mut st, file, ordinal, offset, units * GRANULARITY);
        write(handle, new)
    }
}

/// A handle for an extent that was exported: one more reference to this process's own, or a handle for a foreign one.
fn import(st: &mut State, file: DeviceFile, ordinal: i32, offset: u64, bytes: u64) -> u64 {
    let own = st.vmm.handles.iter_mut().find(|(_, p)| p.extent.offset == offset && p.extent.file.is_same(&file));
    if let Some((&handle, physical)) = own {
        physical.references += 1;
        return handle;
    }
    let ordinal = if check(ordinal).is_ok() { ordinal } else { 0 };
    st.vmm.insert(Physical {
        location: MemLocation::device(ordinal),
        handle_types: POSIX_FD,
        rdma_capable: false,
        extent: Extent { file: Arc::new(file), offset, bytes },
        counted: false,
        exported: true,
        references: 1,
        mappings: 0,
    })
}

/// The host's protection is the widest that any location was given: all of them are threads of one process here.
fn protect(base: u64, mapping: &Mapping) {
    let widest = mapping.access.iter().map(|desc| desc.flags).max().unwrap_or(0);
    let protection = match widest {
        0 => libc::PROT_NONE,
        1 => libc::PROT_READ,
        _ => libc::PROT_READ | libc::PROT_WRITE,
    };
    // SAFETY: the range is a mapping that this module made.
    let result = unsafe { libc::mprotect(base as *mut _, mapping.bytes as usize, protection) };
    assert_eq!(result, 0, "the host cannot protect: too many mappings?");
}
