//! Where device memory comes from. A source knows nothing of pools, streams or bins. Every call may take tens of microseconds
//! and more, so callers hold no lock.
//!
//! | source | memory | gives back |
//! |---|---|---|
//! | `vmm` | pages (`cuMemCreate`) mapped side by side into the device's one reservation | any page, without waiting for the device |
//! | `device` | one `cuMemAlloc` block a segment | whole segments; `cuMemFree` waits for the device |
//! | `managed` | one `cuMemAllocManaged` block a segment, prefetched | whole segments |

mod blocks;
mod ranges;
mod vmm;

use crate::driver::{CuResult, DevicePtr, PageHandle};

pub use blocks::{device, managed};
pub use vmm::vmm;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SourceKind {
    Vmm,
    Device,
    Managed,
}

/// One contiguous, usable range of device addresses.
#[derive(Debug)]
pub struct Segment {
    pub base: DevicePtr,
    /// Bytes.
    pub size: usize,
    /// What the range is made of, in the order of addresses: the handle (0 where the driver has none) and its bytes.
    parts: Vec<(PageHandle, usize)>,
}

impl Segment {
    /// Base and size of every page.
    pub fn pages(&self) -> impl Iterator<Item = (DevicePtr, usize)> {
        let mut at = self.base;
        self.parts.iter().map(move |&(_, size)| {
            let page = (at, size);
            at += size as u64;
            page
        })
    }

    /// Cuts the segment between pages into runs of equal flags, one flag a page.
    pub fn split(self, flags: &[bool]) -> Vec<(bool, Segment)> {
        assert_eq!(flags.len(), self.parts.len(), "one flag a page");
        let mut out: Vec<(bool, Segment)> = Vec::new();
        let mut at = self.base;
        for (part, &flag) in self.parts.into_iter().zip(flags) {
            match out.last_mut() {
                Some((same, run)) if *same == flag => {
                    run.size += part.1;
                    run.parts.push(part);
                }
                _ => out.push((flag, Segment { base: at, size: part.1, parts: vec![part] })),
            }
            at += part.1 as u64;
        }
        out
    }
}

pub trait Source: Send + Sync {
    /// A contiguous range of `size` bytes or a little more, 512-byte aligned or better. On failure nothing is held.
    fn acquire(&self, size: usize) -> CuResult<Segment>;
    /// Gives a segment back, or what is left of one. All work that used it must be complete, unless the driver waits.
    fn release(&self, segment: Segment) -> CuResult<()>;
    fn kind(&self) -> SourceKind;
}
