//! simcuda's runtime: a stand-in for `libcudart`, over whatever driver `libcuda.so.1` is.
//!
//! It reaches the driver as the real one does: `dlopen("libcuda.so.1")`, `dlsym` for `cuGetProcAddress_v2`, and every other
//! function through that. It links to no driver. The same code makes the shared library and the static one.
//!
//! | file | what |
//! |---|---|
//! | `driver.rs` | the way to the driver's functions; contexts |
//! | `error.rs` | the last error, names and texts |
//! | `device.rs`, `memory.rs`, `stream.rs` | the exported functions |

#![allow(non_snake_case, clippy::missing_safety_doc)]

#[macro_use]
mod driver;
mod device;
mod error;
mod memory;
mod stream;
