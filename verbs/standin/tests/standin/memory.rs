//! Registered memory.

use std::ffi::c_int;
use std::os::fd::AsRawFd;

use kvferry_verbs_standin::{Call, WorldOptions, sys};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use sys::ibv_access_flags as rights;
use sys::ibv_wc_status as status;

use crate::common::c;
use crate::common::{BYTES, EVERYTHING, Net, Node, Work, connected, errno, statuses};

fn page_bytes() -> usize {
    // SAFETY: it takes a name and returns a number.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap()
}

#[test]
fn requests_name_memory_by_iova() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, _qb) = connected(&a, &b);
    let register = |node: &Node<'_>, iova| {
        c!(net.verbs, ibv_reg_mr_iova2(node.pd, node.memory(), BYTES, iova, EVERYTHING))
    };
    let (own, remote) = (register(&a, 0x10_0000), register(&b, 0x7000_0000));
    // SAFETY: both were just registered.
    let (lkey, rkey, addr) = unsafe { ((*own).lkey, (*remote).rkey, (*own).addr) };
    assert_eq!(addr, a.memory());
    a.fill(64..72, 3);
    let sges = vec![sys::ibv_sge { addr: 0x10_0000 + 64, length: 8, lkey }];
    let work = Work { sges, remote_addr: 0x7000_0000 + 128, rkey, ..qa.write(1, 0..0, &b) };
    qa.post(std::slice::from_ref(&work)).unwrap();
    assert_eq!((statuses(&a.poll()), b.byte(128..136)), (vec![(1, 0)], 3));
    // Its address is no name for it.
    qa.post(&[Work { remote_addr: b.addr(128), ..work }]).unwrap();
    assert_eq!(statuses(&a.poll()), [(1, status::IBV_WC_REM_ACCESS_ERR)]);
    assert_eq!([own, remote].map(|mr| c!(net.verbs, ibv_dereg_mr(mr))), [0; 2]);
}

#[test]
fn keys_and_qp_numbers_never_come_back() {
    let net = Net::pair();
    let node = Node::new(&net, 0);
    let mut keys = std::collections::BTreeSet::new();
    for _ in 0..100 {
        let mr = node.register(node.pd, EVERYTHING);
        // SAFETY: it was just registered.
        let (lkey, rkey) = unsafe { ((*mr).lkey, (*mr).rkey) };
        assert!(lkey != rkey, "one given for the other would not be noticed");
        assert!(keys.insert(lkey) && keys.insert(rkey));
        assert_eq!(c!(net.verbs, ibv_dereg_mr(mr)), 0);
        let qp = crate::common::Queue::new(&node, Default::default());
        assert!(keys.insert(qp.number() << 8));
    }
}

#[test]
fn a_dma_buf_is_the_file_behind_it() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, _qb) = connected(&a, &b);
    let page = page_bytes();
    let file = memfd_create("kv", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 4 * page as u64).unwrap();
    let register = |offset: usize, bytes: usize, iova: usize| {
        let (offset, iova, fd) = (offset as u64, iova as u64, file.as_raw_fd());
        c!(net.verbs, ibv_reg_dmabuf_mr(b.pd, offset, bytes, iova, fd, EVERYTHING as c_int))
    };
    let (offset, iova) = (page + 24, 16 * page + 24);
    let mr = register(offset, 2 * page, iova);
    assert!(!mr.is_null());
    // SAFETY: it was just registered.
    let (addr, rkey) = unsafe { ((*mr).addr, (*mr).rkey) };
    assert_eq!(addr.addr(), offset, "what the library leaves there is no address");
    a.fill(0..8, 4);
    let work = Work { remote_addr: iova as u64 + 8, ..qa.write(1, 0..8, &b).rkey(rkey) };
    qa.post(std::slice::from_ref(&work)).unwrap();
    assert_eq!(statuses(&a.poll()), [(1, 0)]);
    let mut landed = [0; 10];
    rustix::io::pread(&file, &mut landed, offset as u64 + 7).unwrap();
    assert_eq!(landed, [0, 4, 4, 4, 4, 4, 4, 4, 4, 0]);
    assert_eq!(c!(net.verbs, ibv_dereg_mr(mr)), 0);
    // The page offset of file and iova must agree, and the file must be long enough.
    assert!(register(offset, page, iova + 8).is_null());
    assert_eq!(errno(), libc::EINVAL);
    assert!(register(3 * page, page + 1, 0).is_null());
    assert_eq!(errno(), libc::EINVAL);
    qa.post(&[work]).unwrap();
    assert_eq!(statuses(&a.poll()), [(1, status::IBV_WC_REM_ACCESS_ERR)]);
}

#[test]
fn registering_is_bounded_by_size_by_count_and_by_what_may_be_locked() {
    let net = Net::new(WorldOptions::pair().with(|device| {
        device.limits.max_mr_size = BYTES as u64;
        device.limits.max_pinned_bytes = BYTES as u64 * 5 / 2;
        device.limits.max_mr = 3;
    }));
    let node = Node::new(&net, 0);
    let register = |bytes| {
        let mr = c!(net.verbs, ibv_reg_mr(node.pd, node.memory(), bytes, 1));
        if mr.is_null() { Err(errno()) } else { Ok(mr) }
    };
    assert_eq!(register(BYTES + 1), Err(libc::EINVAL));
    assert_eq!(register(0), Err(libc::EINVAL));
    let second = register(BYTES).unwrap();
    assert_eq!(register(BYTES), Err(libc::ENOMEM), "two and a half may be locked");
    let third = register(BYTES / 2).unwrap();
    assert_eq!(c!(net.verbs, ibv_dereg_mr(second)), 0);
    let second = register(1).unwrap();
    assert_eq!(register(1), Err(libc::ENOMEM), "three may exist");
    assert_eq!([second, third].map(|mr| c!(net.verbs, ibv_dereg_mr(mr))), [0; 2]);
}

#[test]
fn a_dma_buf_does_not_count_as_locked() {
    let net =
        Net::new(WorldOptions::pair().with(|device| device.limits.max_pinned_bytes = BYTES as u64));
    let node = Node::new(&net, 0);
    let file = memfd_create("kv", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 64).unwrap();
    let mr = c!(net.verbs, ibv_reg_dmabuf_mr(node.pd, 0, 64, 0, file.as_raw_fd(), 1));
    assert!(!mr.is_null());
    assert_eq!(c!(net.verbs, ibv_dereg_mr(mr)), 0);
}

#[test]
fn memory_that_is_not_mapped_cannot_be_registered() {
    let net = Net::pair();
    let node = Node::new(&net, 0);
    let page = page_bytes();
    for addr in [page, usize::MAX - 2 * page] {
        let addr = std::ptr::without_provenance_mut(addr);
        assert!(c!(net.verbs, ibv_reg_mr(node.pd, addr, page, 1)).is_null());
        assert_eq!(errno(), libc::EFAULT);
    }
}

#[test]
fn access_that_makes_no_sense_is_refused_and_hints_are_ignored() {
    let net = Net::pair();
    let node = Node::new(&net, 0);
    let register = |access: u32| {
        let addr = node.memory();
        let mr = c!(net.verbs, ibv_reg_mr_iova2(node.pd, addr, 64, 0, access));
        if mr.is_null() { errno() } else { c!(net.verbs, ibv_dereg_mr(mr)) }
    };
    assert_eq!(register(rights::IBV_ACCESS_REMOTE_WRITE.0), libc::EINVAL);
    assert_eq!(register(rights::IBV_ACCESS_ON_DEMAND.0), libc::EINVAL);
    assert_eq!(register(EVERYTHING | rights::IBV_ACCESS_RELAXED_ORDERING.0), 0);
    assert_eq!(register(0), 0, "memory to send from");
}

#[test]
fn registering_fails_when_a_script_says_so() {
    let net = Net::pair();
    let node = Node::new(&net, 0);
    let register = || {
        let mr = c!(net.verbs, ibv_reg_mr(node.pd, node.memory(), 64, 1));
        if mr.is_null() { errno() } else { c!(net.verbs, ibv_dereg_mr(mr)) }
    };
    net.world.fail_calls(0, Call::RegMr, libc::ENOMEM, 1, 2);
    net.world.fail_call(1, Call::RegMr, libc::EFAULT);
    assert_eq!([0; 4].map(|_| register()), [0, libc::ENOMEM, libc::ENOMEM, 0]);
    let file = memfd_create("kv", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 64).unwrap();
    net.world.fail_call(0, Call::RegDmabufMr, libc::EOPNOTSUPP);
    let register = || c!(net.verbs, ibv_reg_dmabuf_mr(node.pd, 0, 64, 0, file.as_raw_fd(), 1));
    assert!(register().is_null());
    assert_eq!(errno(), libc::EOPNOTSUPP);
    let mr = register();
    assert_eq!(c!(net.verbs, ibv_dereg_mr(mr)), 0);
}
