//! gpupool: a caching allocator for CUDA memory with a C ABI.
//!
//! # The layers, top down
//! Each may use those below it, never above; `tests/project.rs` checks it against this list.
//!
//! ```text
//! preload    doors: CUDA's own functions, served in any program that the library is preloaded into
//! ffi        doors: what programs call. Check arguments, find the pool, translate errors
//! cache      magazines of ready blocks, by thread and stream: where most mallocs and frees begin and end
//! pinned     freed pinned host memory, kept
//! registry   context -> Pool; contexts that die, the background thread, the report at exit
//! managers   CNMeM's tree of managers, behind the cnmem door
//! pool       bins over coalescing free space, streams, fences; the contract stands at the top of pool/mod.rs
//! ipc        blocks that another process opens
//! source     where device memory comes from: vmm (pages), device (cuMemAlloc), managed; the process's share of a device
//! driver     the CUDA driver functions used, and the only file that names cudarc
//! linker, log, config, error, stats, sync, thread, arch    leaves
//! ```
//!
//! # One cold allocation, step by step
//! 1. `gpupoolMalloc` (`ffi/gpupool.rs`) finds no magazine (`cache.rs`), enters the panic guard, and asks the registry for the pool of
//!    the stream's context, or of the current one. A program's `cudaMalloc` comes in by `preload/runtime.rs` or, from wherever it
//!    got the driver's `cuMemAlloc`, by `preload/memory.rs`.
//! 2. `registry::pool_for_stream` finds no pool, picks a source (pages where the device has them) and makes one.
//! 3. `Pool::malloc` (`pool/mod.rs`) rounds the request: to a bin, or to 512 bytes above `GPUPOOL_BIN_MAX`. It looks in the
//!    bin of the stream, then in the stream's free space and in what any stream may have, under the pool's lock and without a driver
//!    call. All are empty.
//! 4. `serve_slow` (`pool/pages.rs`) asks what others freed: for a call that names no stream one barrier on the device makes it
//!    anybody's, else what has finished is (`pool/fence.rs`); there is none.
//! 5. `grow` asks the source for a segment, with no lock held: `source/vmm.rs` takes addresses out of the arena's reservation,
//!    creates page handles, maps them and opens them to the device.
//! 6. The segment joins the `Space` (`pool/space.rs`) as one free block; the request is cut off its low end, and the rest waits for
//!    the next. `pool/table.rs` finds the block again by its address alone.
//!
//! # Where this differs from CUB, and from the plan
//! * CUB records an event per free and searches blocks by binned size alone. Here a free that names a stream records nothing (a stamp is
//!   read), large blocks coalesce, and memory moves between streams by one event for the whole context.
//! * The cache stands above the registry, not below: a hit needs neither, a miss needs both.
//! * Frees without a stream share the epochs of those with one: each is a closing of its own, by re-recording one event. So one clock says
//!   what is finished, what is ordered, and what neither.
//! * During a capture an allocation without a stream goes to the driver, and a free asks it with an address that frees nothing: whether
//!   a mode and a thread allow it is the driver's to say, and a capture ends as it would have.
//! * A block's record takes a cache line (64 bytes), not 16: neighbours, owner, stamp and state side by side. With 4 bytes for every
//!   4 KiB of addresses that is 0.2 % of the device memory for blocks of 64 KiB, and less for larger ones.

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
#[cfg(test)]
mod testing;
mod thread;
