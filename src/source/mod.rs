//! Where device memory comes from. A source knows nothing of pools, streams or bins. Every call may take tens of microseconds
//! and more, so callers hold no lock.
//!
//! | source | memory | gives back |
//! |---|---|---|
//! | `vmm` | pages (`cuMemCreate`) mapped side by side into the device's one reservation | any page, without waiting for the device |
//! | `device` | one `cuMemAlloc` block a segment | whole segments; `cuMemFree` waits for the device |
//! | `managed` | one `cuMemAllocManaged` block a segment, prefetched | whole segments |

mod blocks;
pub mod budget;
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

/// Blocks of different sizes live apart, so that small ones do not pin the pages of large ones, and so that the table over their
/// addresses stays small: blocks under 4 KiB, under the largest bin, and above.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arena {
    Tiny = 0,
    Small = 1,
    Large = 2,
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
    #[cfg(test)]
    pub fn pages(&self) -> impl Iterator<Item = (DevicePtr, usize)> {
        let mut at = self.base;
        self.parts.iter().map(move |&(_, size)| {
            let page = (at, size);
            at += size as u64;
            page
        })
    }

    /// The segment page by page.
    pub fn into_pages(self) -> impl Iterator<Item = Segment> {
        let mut at = self.base;
        self.parts.into_iter().map(move |part| {
            let page = Segment { base: at, size: part.1, parts: vec![part] };
            at += part.1 as u64;
            page
        })
    }

    /// The handle of every page, 0 where the driver has none, and its bytes.
    pub fn handles(&self) -> &[(PageHandle, usize)] {
        &self.parts
    }
}

/// A block that another process is to see: the pages it lies in, side by side, and where in them.
#[derive(Debug)]
pub struct Shareable {
    pub pages: Vec<(PageHandle, usize)>,
    /// Bytes from the first page's start.
    pub offset: usize,
    pub size: usize,
}

pub trait Source: Send + Sync {
    /// A contiguous range of `size` bytes or a little more, 512-byte aligned or better. On failure nothing is held.
    fn acquire(&self, arena: Arena, size: usize) -> CuResult<Segment>;
    /// The memory of `pages`, whose work must be complete, moves to a contiguous range, followed by new pages of `page` bytes each up to
    /// `size` in all: to `at`, or anywhere when those addresses are not free. On failure the pages are gone, and nothing is held.
    fn gather(
        &self,
        arena: Arena,
        _at: Option<DevicePtr>,
        pages: Vec<Segment>,
        size: usize,
        _page: usize,
    ) -> CuResult<Segment> {
        pages.into_iter().try_for_each(|page| self.release(page))?;
        self.acquire(arena, size)
    }
    /// The largest page; 0 where there are none.
    fn page_max(&self) -> usize {
        0
    }
    /// Gives a segment back, or a page of one. All work that used it must be complete, unless the driver waits.
    fn release(&self, segment: Segment) -> CuResult<()>;
    /// The memory went with its context: it only no longer counts.
    fn forget(&self, _segment: Segment) {}
    fn kind(&self) -> SourceKind;
}
