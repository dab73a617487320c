//! Work that executes at once allocates nothing, so that what a caller's instructions are counted
//! against stays the same from run to run. A test of its own, as it counts for the whole process.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use kvferry_verbs_standin::sys;
use sys::ibv_wr_opcode as wr;

#[path = "standin/common/mod.rs"]
#[allow(dead_code, unused_imports, unreachable_pub, reason = "shared with the other tests")]
mod common;

use common::{Net, Node, connected};

const REQUESTS: usize = 8;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, counted for each thread.
struct Counting;

// SAFETY: everything is left to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn requests_that_execute_at_once_allocate_nothing() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, qb) = connected(&a, &b);
    let mut sge = a.sge(0..1000);
    let kinds = [wr::IBV_WR_RDMA_WRITE, wr::IBV_WR_RDMA_WRITE_WITH_IMM, wr::IBV_WR_SEND];
    let mut list = [sys::ibv_send_wr::default(); REQUESTS];
    let mut receives = [sys::ibv_recv_wr::default(); REQUESTS];
    let mut place = b.sge(0..1000);
    let needs_receive = |index: usize| kinds[index % kinds.len()] != wr::IBV_WR_RDMA_WRITE;
    let needed = (0..REQUESTS).filter(|index| needs_receive(*index)).count();
    let (first, first_receive) = (list.as_mut_ptr(), receives.as_mut_ptr());
    for index in 0..REQUESTS {
        // SAFETY: all are inside the two lists, which are not moved any more.
        unsafe {
            let request = &mut *first.add(index);
            request.sg_list = &raw mut sge;
            request.num_sge = 1;
            request.opcode = kinds[index % kinds.len()];
            request.send_flags = common::SIGNALED;
            request.wr.rdma.remote_addr = b.addr(0);
            request.wr.rdma.rkey = b.rkey();
            let receive = &mut *first_receive.add(index);
            receive.sg_list = &raw mut place;
            receive.num_sge = 1;
            if index > 0 {
                (*first.add(index - 1)).next = first.add(index);
            }
            if index > 0 && index < needed {
                (*first_receive.add(index - 1)).next = first_receive.add(index);
            }
        }
    }
    let mut entries = [sys::ibv_wc::default(); 2 * REQUESTS];
    let round = |entries: &mut [sys::ibv_wc]| {
        let (mut bad, mut bad_receive) = (std::ptr::null_mut(), std::ptr::null_mut());
        let room = entries.len() as i32;
        // SAFETY: the queues, their contexts and both lists are there, and there is room.
        unsafe {
            let ops = (*a.context).ops;
            let receive = ops.post_recv.unwrap()(qb.qp, first_receive, &raw mut bad_receive);
            let posted = ops.post_send.unwrap()(qa.qp, first, &raw mut bad);
            let sent = ops.poll_cq.unwrap()(a.cq, room, entries.as_mut_ptr());
            let arrived = ops.poll_cq.unwrap()(b.cq, room, entries.as_mut_ptr());
            (receive, posted, sent, arrived)
        }
    };
    let before = ALLOCATIONS.get();
    for _ in 0..100 {
        assert_eq!(round(&mut entries), (0, 0, REQUESTS as i32, needed as i32));
    }
    assert_eq!(ALLOCATIONS.get() - before, 0);
    // The counter counts.
    drop(std::hint::black_box(Box::new(1)));
    assert_eq!(ALLOCATIONS.get() - before, 1);
}
