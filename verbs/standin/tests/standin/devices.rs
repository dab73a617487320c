//! Devices, ports and addresses.

use std::mem::MaybeUninit;

use kvferry_verbs_standin::{DeviceOptions, Gid, World, WorldOptions, resolve, sys};
use sys::ibv_wc_status as status;

use crate::common::c;
use crate::common::{Net, Node, Queue, Setup, connected, errno, statuses};

#[test]
fn devices_of_all_worlds_are_listed_under_names_of_their_own() {
    let (one, other) = (Net::pair(), Net::new(WorldOptions::devices(1)));
    let mut count = 0;
    let list = c!(one.verbs, ibv_get_device_list(&raw mut count));
    let mut listed = Vec::new();
    let mut guids = Vec::new();
    for index in 0..count as usize {
        // SAFETY: the list holds `count` devices.
        let device = unsafe { *list.add(index) };
        let name = c!(one.verbs, ibv_get_device_name(device));
        // SAFETY: a name lives as long as the list.
        let name = unsafe { std::ffi::CStr::from_ptr(name) }.to_str().unwrap().to_owned();
        listed.push(name);
        guids.push(c!(one.verbs, ibv_get_device_guid(device)));
    }
    // SAFETY: the list ends with a null.
    assert!(unsafe { *list.add(count as usize) }.is_null());
    c!(one.verbs, ibv_free_device_list(list));
    for name in one.world.device_names().iter().chain(&other.world.device_names()) {
        assert_eq!(listed.iter().filter(|listed| *listed == name).count(), 1, "{name}");
    }
    guids.sort_unstable();
    guids.dedup();
    assert_eq!(guids.len(), count as usize);
}

#[test]
fn a_world_that_is_gone_lists_nothing() {
    let names = World::new(WorldOptions::pair()).device_names();
    let net = Net::pair();
    let mut count = 0;
    let list = c!(net.verbs, ibv_get_device_list(&raw mut count));
    for index in 0..count as usize {
        // SAFETY: the list holds `count` devices, and a name lives as long as it.
        let name =
            unsafe { std::ffi::CStr::from_ptr((net.verbs.ibv_get_device_name)(*list.add(index))) };
        assert!(!names.contains(&name.to_str().unwrap().to_owned()));
    }
    c!(net.verbs, ibv_free_device_list(list));
}

#[test]
fn functions_are_missing_when_a_script_says_so() {
    let mut options = WorldOptions::pair();
    options.missing_symbols = vec!["ibv_reg_dmabuf_mr"];
    let world = World::new(options);
    assert!(world.resolve("ibv_reg_dmabuf_mr").is_null());
    assert!(!world.resolve("ibv_reg_mr").is_null());
    assert!(!resolve("ibv_reg_dmabuf_mr").is_null());
    assert!(resolve("ibv_no_such_function").is_null());
}

#[test]
fn the_library_it_stands_in_for_is_not_loaded() {
    let net = Net::pair();
    let _node = Node::new(&net, 0);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(maps.contains("libc.so"), "the test looks at the right list");
    assert!(!maps.contains("libibverbs"), "{maps}");
}

#[test]
fn limits_are_what_the_options_say() {
    let net = Net::new(WorldOptions::pair().with(|device| {
        device.limits.max_qp_wr = 77;
        device.limits.max_mr_size = 1 << 20;
        device.limits.max_srq_wr = 99;
    }));
    let node = Node::new(&net, 1);
    let mut attr = sys::ibv_device_attr::default();
    assert_eq!(c!(net.verbs, ibv_query_device(node.context, &raw mut attr)), 0);
    assert_eq!((attr.max_qp_wr, attr.max_srq_wr, attr.max_mr_size), (77, 99, 1 << 20));
    assert_eq!((attr.phys_port_cnt, attr.max_qp_rd_atom), (1, 16));
}

#[test]
fn querying_a_port_writes_nothing_behind_the_old_struct() {
    let net = Net::pair();
    let node = Node::new(&net, 0);
    let mut attr = MaybeUninit::<sys::ibv_port_attr>::uninit();
    const BYTES: usize = size_of::<sys::ibv_port_attr>();
    // SAFETY: any bytes may be written to it.
    unsafe { attr.as_mut_ptr().cast::<u8>().write_bytes(0xee, BYTES) };
    assert_eq!(c!(net.verbs, ibv_query_port(node.context, 1, attr.as_mut_ptr().cast())), 0);
    // SAFETY: every byte of it was written, and it consists of numbers.
    let attr = unsafe { attr.assume_init() };
    assert_eq!(attr.state, sys::ibv_port_state::IBV_PORT_ACTIVE);
    assert_eq!(u32::from(attr.link_layer), sys::IBV_LINK_LAYER_ETHERNET);
    assert_eq!((attr.lid, attr.gid_tbl_len), (0, 8));
    assert_eq!((attr.port_cap_flags2, attr.active_speed_ex), (0xeeee, 0xeeee_eeee));
    let mut attr = sys::ibv_port_attr::default();
    for port in [0, 2] {
        let code = c!(net.verbs, ibv_query_port(node.context, port, (&raw mut attr).cast()));
        assert_eq!(code, libc::EINVAL);
    }
}

#[test]
fn the_table_of_gids_is_that_of_a_host_with_one_ipv4_address() {
    let net = Net::pair();
    let node = Node::new(&net, 1);
    let mut entries = [sys::ibv_gid_entry::default(); 8];
    let bytes = size_of::<sys::ibv_gid_entry>();
    let table = |room| {
        let entries = entries.as_ptr().cast_mut();
        c!(net.verbs, _ibv_query_gid_table(node.context, entries, room, 0, bytes))
    };
    assert_eq!(table(3), -(libc::EINVAL as isize), "no room");
    assert_eq!(table(8), 4);
    let kinds = entries.map(|entry| (entry.gid_index, entry.gid_type));
    let (v1, v2) = (sys::IBV_GID_TYPE_ROCE_V1, sys::IBV_GID_TYPE_ROCE_V2);
    assert_eq!(kinds[..4], [(0, v1), (1, v2), (2, v1), (3, v2)]);
    // SAFETY: both fields of the union are 16 plain bytes.
    let raw = entries.map(|entry| unsafe { entry.gid.raw });
    assert_eq!(raw[3], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 1, 1]);
    assert_eq!(raw[1][..2], [0xfe, 0x80]);
    // An entry that is not in use is zeros for the one function and no data for the other.
    let mut gid = sys::ibv_gid { raw: [0xee; 16] };
    assert_eq!(c!(net.verbs, ibv_query_gid(node.context, 1, 4, &raw mut gid)), 0);
    // SAFETY: as above.
    assert_eq!(unsafe { gid.raw }, [0; 16]);
    let one = &raw mut entries[0];
    assert_eq!(c!(net.verbs, _ibv_query_gid_ex(node.context, 1, 4, one, 0, bytes)), libc::ENODATA);
    assert_eq!(c!(net.verbs, _ibv_query_gid_ex(node.context, 1, 2, one, 0, bytes)), 0);
    assert_eq!(entries[0].gid_index, 2);
    assert_eq!(c!(net.verbs, ibv_query_gid(node.context, 1, 8, &raw mut gid)), -1);
    assert_eq!(errno(), libc::EINVAL);
    let mut pkey = 0;
    assert_eq!(c!(net.verbs, ibv_query_pkey(node.context, 1, 0, &raw mut pkey)), 0);
    assert_eq!(pkey, 0xffff);
}

#[test]
fn infiniband_ports_reach_each_other_by_lid() {
    let options = WorldOptions {
        devices: vec![DeviceOptions::infiniband(4), DeviceOptions::infiniband(9)],
        ..WorldOptions::pair()
    };
    let net = Net::new(options);
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let setup = Setup { gid_index: 0, ..Setup::default() };
    let (qa, qb) = (Queue::new(&a, setup), Queue::new(&b, setup));
    for (own, peer, lid) in [(&qa, &qb, 9), (&qb, &qa, 4)] {
        let mut attr = own.attributes(peer);
        attr.ah_attr = sys::ibv_ah_attr { dlid: lid, port_num: 1, ..Default::default() };
        own.connect_with(&attr);
    }
    qa.post(&[qa.write(1, 0..8, &b)]).unwrap();
    assert_eq!(statuses(&a.poll()), [(1, status::IBV_WC_SUCCESS)]);
}

#[test]
fn an_address_that_moves_to_another_device_takes_its_traffic_along() {
    let net = Net::new(WorldOptions::devices(3));
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, _qb) = connected(&a, &b);
    qa.post(&[qa.write(1, 0..8, &b)]).unwrap();
    assert_eq!(statuses(&a.poll()), [(1, status::IBV_WC_SUCCESS)]);
    let moved = Gid {
        bytes: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 1, 1],
        kind: sys::IBV_GID_TYPE_ROCE_V2,
    };
    net.world.set_gid(1, 1, 3, None);
    net.world.set_gid(2, 1, 3, Some(moved));
    assert_eq!(b.events(), [(sys::IBV_EVENT_GID_CHANGE, 1)]);
    qa.post(&[qa.write(2, 0..8, &b)]).unwrap();
    net.world.expire();
    assert_eq!(statuses(&a.poll()), [(2, status::IBV_WC_RETRY_EXC_ERR)]);
}

#[test]
fn a_device_that_is_gone_says_so_once_and_nothing_more() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, qb) = connected(&a, &b);
    net.world.kill_device(0);
    assert_eq!(a.events(), [(sys::IBV_EVENT_DEVICE_FATAL, 1)]);
    qa.post(&[qa.write(1, 0..8, &b)]).unwrap();
    qb.post(&[qb.write(2, 0..8, &a)]).unwrap();
    net.world.expire();
    assert_eq!(a.poll(), []);
    assert_eq!(statuses(&b.poll()), [(2, status::IBV_WC_RETRY_EXC_ERR)]);
    assert_eq!(qa.enter(sys::ibv_qp_state::IBV_QPS_ERR), libc::EIO);
    assert!(c!(net.verbs, ibv_alloc_pd(a.context)).is_null());
    assert_eq!(errno(), libc::EIO);
    // That all can be destroyed is seen as they are dropped.
}
