//! Pages: physical memory in handles of 2 to 32 MiB, mapped side by side into one large reservation a device.
//!
//! None of these calls waits for running kernels (measured on an H200: create, map, set access, unmap and release of 2 MiB
//! take 46, 3, 57, 36 and 46 us beside a 10 ms kernel), so memory comes and goes without stopping the device.

use std::collections::HashMap;

use once_cell::sync::Lazy;
use parking_lot::Mutex;

use super::ranges::Ranges;
use super::{Segment, Source, SourceKind};
use crate::driver::{CuError, CuResult, DevicePtr, Driver, PageHandle};

/// A page is at most this large, so that a live block holds no more than this back (contract 6 of the design).
const PAGE_MAX: usize = 32 << 20;
/// The reservation: this many times the device's memory, and less where the driver refuses.
const RESERVE_FACTOR: usize = 16;
const RESERVE_MIN: usize = 1 << 30;
/// Requests from here on ask what is free first (4 us).
const LARGE: usize = 256 << 20;

/// The reservations, made once a device and kept for the process: addresses cost nothing.
static RESERVED: Lazy<Mutex<HashMap<i32, &'static Mutex<Ranges>>>> = Lazy::new(Default::default);

pub struct VmmSource {
    driver: &'static Driver,
    ordinal: i32,
    granularity: usize,
    page_max: usize,
    /// Bytes of the device.
    total: usize,
    /// Who may reach the memory: the device itself, then its peers. `cudaDeviceEnablePeerAccess` opens only `cuMemAlloc`'s
    /// memory, so pages are open to every device that could be a peer, enabled before or after.
    readers: Vec<i32>,
    ranges: &'static Mutex<Ranges>,
}

/// Pages of device `ordinal`, one of whose contexts must be current.
pub fn vmm(driver: &'static Driver, ordinal: i32) -> CuResult<VmmSource> {
    let granularity = driver.vmm_granularity(ordinal)?;
    let total = driver.device_total(ordinal)?;
    let page_max = (total / 64).clamp(granularity, PAGE_MAX) / granularity * granularity;
    let known = RESERVED.lock().get(&ordinal).copied();
    let ranges = match known {
        Some(ranges) => ranges,
        None => {
            let (base, size) = reserve(driver, total)?;
            log::debug!("device {ordinal}: {} GiB of addresses at {base:#x}", size >> 30);
            let mut reserved = RESERVED.lock();
            // Should another thread have been faster, this reservation stays unused.
            let mine = || &*Box::leak(Box::new(Mutex::new(Ranges::new(base, size))));
            *reserved.entry(ordinal).or_insert_with(mine)
        }
    };
    let peers = (0..driver.device_count()?)
        .filter(|&peer| peer != ordinal && driver.can_access_peer(peer, ordinal).unwrap_or(false));
    let readers = std::iter::once(ordinal).chain(peers).collect();
    Ok(VmmSource { driver, ordinal, granularity, page_max, total, readers, ranges })
}

fn reserve(driver: &Driver, total: usize) -> CuResult<(DevicePtr, usize)> {
    let mut size = total.saturating_mul(RESERVE_FACTOR).next_power_of_two().max(RESERVE_MIN);
    loop {
        match driver.va_reserve(size) {
            Ok(base) => return Ok((base, size)),
            Err(e) if size / 2 < RESERVE_MIN => return Err(e),
            Err(_) => size /= 2,
        }
    }
}

impl VmmSource {
    /// Creates and maps pages for `size` bytes at `base`, telling of each in `parts`.
    fn populate(&self, base: DevicePtr, size: usize, parts: &mut Vec<(PageHandle, usize)>) -> CuResult<()> {
        let mut done = 0;
        while done < size {
            let page = self.page_max.min(size - done);
            let handle = self.driver.page_create(self.ordinal, page)?;
            if let Err(e) = self.driver.page_map(base + done as u64, page, handle) {
                let _ = self.driver.page_release(handle);
                return Err(e);
            }
            parts.push((handle, page));
            done += page;
        }
        match self.driver.page_access(base, size, &self.readers) {
            // A peer may refuse; the device's own memory must not fail for that.
            Err(e) if self.readers.len() > 1 && e != CuError::OUT_OF_MEMORY => {
                log::debug!("device {}: pages are not open to its peers: {e:?}", self.ordinal);
                self.driver.page_access(base, size, &[self.ordinal])
            }
            other => other,
        }
    }

    /// Unmaps and releases pages; goes on after an error and tells of the first. Pages that cannot be unmapped keep their
    /// addresses, so that nothing is ever mapped over them.
    fn dismantle(&self, base: DevicePtr, parts: Vec<(PageHandle, usize)>) -> CuResult<()> {
        let mut first = Ok(());
        let mut at = base;
        for (handle, size) in parts {
            let unmapped = self.driver.page_unmap(at, size);
            if unmapped.is_ok() {
                self.ranges.lock().give(at, size);
            }
            first = first.and(unmapped).and(self.driver.page_release(handle));
            at += size as u64;
        }
        first
    }
}

impl Source for VmmSource {
    fn acquire(&self, size: usize) -> CuResult<Segment> {
        let size = size.checked_next_multiple_of(self.granularity).ok_or(CuError::OUT_OF_MEMORY)?;
        // Said before thousands of pages are made and given back: more than there is.
        let free = if size >= LARGE { self.driver.mem_info().map_or(self.total, |(free, _)| free) } else { self.total };
        if size > free {
            return Err(CuError::OUT_OF_MEMORY);
        }
        let base = self.ranges.lock().take(size).ok_or(CuError::OUT_OF_MEMORY)?;
        let mut parts = Vec::with_capacity(size.div_ceil(self.page_max).min(1 << 12));
        match self.populate(base, size, &mut parts) {
            Ok(()) => Ok(Segment { base, size, parts }),
            Err(e) => {
                let mapped: usize = parts.iter().map(|p| p.1).sum();
                if let Err(e) = self.dismantle(base, parts) {
                    log::warn!("pages of a failed allocation could not be given back: {e:?}");
                }
                if mapped < size {
                    self.ranges.lock().give(base + mapped as u64, size - mapped);
                }
                // Whatever step refused, there is no memory to be had now.
                log::debug!("{size} bytes of pages could not be had: {e:?}");
                Err(if is_final(e) { e } else { CuError::OUT_OF_MEMORY })
            }
        }
    }

    fn release(&self, segment: Segment) -> CuResult<()> {
        self.dismantle(segment.base, segment.parts)
    }

    fn kind(&self) -> SourceKind {
        SourceKind::Vmm
    }
}

/// Errors that no retry helps: the driver or the context is gone.
fn is_final(e: CuError) -> bool {
    matches!(e, CuError::NOT_INITIALIZED | CuError::DEINITIALIZED | CuError::NO_DEVICE) || e.0 >= 700
}

#[cfg(test)]
mod tests;
