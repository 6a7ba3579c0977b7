//! Link arguments, and the C headers: cbindgen writes `cnmem.h` and `gpupool.h` into OUT_DIR from the doors' sources.
//! `make headers` copies them to `include/`, where they are committed; `tests/project.rs` says when they drift. A header that
//! cannot be written is an error: it would be a door without a sign.

use std::path::Path;

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libgpupool.so.0");
    // Frees may come from static destructors and threads that outlive a dlclose: the library never unloads.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");

    let out = std::env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    for (header, sources) in
        [("cnmem", &["src/ffi/cnmem.rs"][..]), ("gpupool", &["src/ffi/gpupool.rs", "src/ffi/torch.rs"][..])]
    {
        let config_file = format!("cbindgen.{header}.toml");
        println!("cargo:rerun-if-changed={config_file}");
        let config = cbindgen::Config::from_file(&config_file).expect("a readable cbindgen configuration");
        let mut builder = cbindgen::Builder::new().with_config(config);
        for source in sources {
            println!("cargo:rerun-if-changed={source}");
            builder = builder.with_src(source);
        }
        let bindings = builder.generate().expect("cbindgen reads the doors");
        bindings.write_to_file(Path::new(&out).join(format!("{header}.h")));
    }
    // Where `make headers` and the drift test find them.
    println!("cargo:rustc-env=GPUPOOL_HEADERS={out}");
}
