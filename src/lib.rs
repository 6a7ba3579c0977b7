//! gpupool: a caching allocator for CUDA memory with a C ABI.
//!
//! # The layers, top down
//! Each may use those below it, never above; `tests/project.rs` checks it against this list.
//!
//! ```text
//! preload    doors: CUDA's own functions, served in any program that the library is preloaded into
//! ffi        doors: what programs call. Check arguments, find the pool, translate errors
//! cache      magazines of ready blocks, by thread and stream
//! pinned     freed pinned host memory, kept
//! registry   context -> Pool
//! managers   CNMeM's tree of managers, behind the cnmem door
//! pool       bins over coalescing free space, streams, fences; the contract stands at the top of pool/mod.rs
//! ipc        blocks that another process opens
//! source     where device memory comes from: vmm (pages), device (cuMemAlloc), managed
//! driver     the CUDA driver functions used, and the only file that names cudarc
//! linker, log, config, error, stats, sync, thread, arch    leaves
//! ```
//!
//! # One cold allocation, step by step
//! 1. `gpupoolMalloc` (`ffi/gpupool.rs`) enters the panic guard, checks its arguments and asks the registry for the pool of
//!    the stream's context, or of the current one.
//! 2. `registry::pool_for_stream` finds no pool, picks a source (pages where the device has them) and makes one.
//! 3. `Pool::malloc` (`pool/mod.rs`) rounds the request: to a bin, or to 512 bytes above `GPUPOOL_BIN_MAX`. It looks in the
//!    bin of the stream, then in the stream's free space, under the pool's lock and without a driver call. Both are empty.
//! 4. `malloc_slow` asks what other streams' memory has finished (`pool/fence.rs`); there is none.
//! 5. `grow` asks the source for a segment, with no lock held: `source/vmm.rs` takes addresses out of the device's one
//!    reservation, creates page handles, maps them and opens them to the device.
//! 6. The segment becomes a region of the `Space` (`pool/space.rs`), one free block; the request is cut off its low end, and
//!    the rest waits for the next.
//!
//! # Where this differs from CUB
//! CUB records an event per free and searches blocks by binned size alone. Here a free records nothing (a stamp is read),
//! large blocks coalesce, and memory moves between streams by one event for the whole context.

mod arch;
mod cache;
mod config;
mod driver;
mod error;
mod ffi;
mod ipc;
mod linker;
mod log;
mod managers;
mod pinned;
mod pool;
mod preload;
mod registry;
mod source;
mod stats;
mod sync;
mod thread;
#[cfg(test)]
mod testing;
