//! Graphs, as far as captures make them: a list of work that a launch submits again.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use crate::call::driver_fns;
use crate::codes::*;
use crate::engine::Op;
use crate::memory::Freed;
use crate::state::state;

#[derive(Default, Clone)]
pub struct Graph {
    pub nodes: Vec<Op>,
    /// Memory freed inside the graph: each launch uses it again, so it lives as long as the graph.
    pub owned: Vec<Arc<Freed>>,
}

driver_fns! {
    fn cuGraphCreate(graph: *mut usize, flags: u32) {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        let handle = state().graphs.insert(Graph::default());
        write(graph, handle)
    }

    fn cuGraphDestroy(graph: usize) {
        let removed = state().graphs.remove(graph);
        release(removed.ok_or(INVALID_VALUE)?);
        Ok(())
    }

    fn cuGraphInstantiate_v2(
        exec: *mut usize, graph: usize, _node: *mut c_void, _log: *mut c_char, _log_bytes: usize,
    ) {
        instantiate(exec, graph)
    }

    fn cuGraphInstantiateWithFlags(exec: *mut usize, graph: usize, _flags: u64) {
        instantiate(exec, graph)
    }

    fn cuGraphExecDestroy(exec: usize) {
        let removed = state().graph_execs.remove(exec);
        release(removed.ok_or(INVALID_VALUE)?);
        Ok(())
    }

    fn cuGraphLaunch | cuGraphLaunch_ptsz(exec: usize, stream: usize), null => {
        let mut st = state();
        let stream = st.stream(stream, null)?;
        let nodes = st.graph_execs.get(exec).ok_or(INVALID_VALUE)?.nodes.clone();
        for op in nodes {
            st.submit(&stream, op)?;
        }
        Ok(())
    }

    /// Tells how many nodes there are; the nodes have no handles.
    fn cuGraphGetNodes(graph: usize, nodes: *mut usize, count: *mut usize) {
        let st = state();
        let found = st.graphs.get(graph).ok_or(INVALID_VALUE)?.nodes.len();
        if !nodes.is_null() {
            return Err(NOT_SUPPORTED);
        }
        write(count, found)
    }
}

fn instantiate(exec: *mut usize, graph: usize) -> Answer {
    let mut st = state();
    let copy = st.graphs.get(graph).ok_or(INVALID_VALUE)?.clone();
    let handle = st.graph_execs.insert(copy);
    write(exec, handle)
}

/// The last of a graph and its executable copies gives the graph's memory back. The state's lock must not be held.
fn release(graph: Graph) {
    for freed in graph.owned.into_iter().filter_map(Arc::into_inner) {
        freed.release();
    }
}
