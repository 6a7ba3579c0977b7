fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // As the real driver: its own references to its functions are never interposed by a preloaded library.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    // Its worker threads outlive any dlclose.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
