//! Devices and what is made from them.

use kvferry_verbs::{
    AsyncEvent, Capacities, Completion, Context, InitAttributes, Inventory, LinkLayer, Mtu,
    PortState, QpOptions, QpState, SrqOptions, VerbsError, rank_gids,
};

use crate::rig::{ALL, PORT, Rig, SEND_WRS, USUAL, options, pattern, wait};

#[test]
fn a_device_that_is_not_there_is_said_not_to_be_and_which_are() {
    let Some(rig) = Rig::open() else { return };
    let library = rig.a.context.library();
    let error = Context::open(library, "kvferry0").unwrap_err();
    let VerbsError::NoSuchDevice { device, have } = &error else { panic!("{error:?}") };
    assert_eq!(device, "kvferry0");
    assert!(have.iter().any(|name| name == rig.a.context.name()), "{have:?}");
    let error = rig.a.context.port(200).unwrap_err();
    assert!(matches!(error, VerbsError::NoSuchPort { port: 200, .. }), "{error:?}");
}

#[test]
fn what_a_device_tells_agrees_with_sysfs() {
    let Some(rig) = Rig::open() else { return };
    let inventory = Inventory::host().unwrap();
    for side in [&rig.a, &rig.b] {
        let name = side.context.name();
        let device = inventory.devices.iter().find(|device| device.name == name).unwrap();
        let attributes = side.context.attributes().unwrap();
        assert_eq!(usize::from(attributes.ports), device.ports.len());
        assert!(attributes.max_qp_wr >= SEND_WRS && attributes.max_mr_size > 0, "{attributes:?}");
        let port = side.context.port(PORT).unwrap();
        let shown = &device.ports[0];
        assert_eq!((Some(port.state), Some(port.link_layer)), (shown.state, shown.link_layer));
        assert_eq!((port.physical_state, port.state), (shown.physical_state, PortState::Active));
        assert_eq!(Some(port.rate_mbit_s), shown.rate_mbit_s);
        assert!(port.active_mtu >= Mtu::Bytes256 && port.active_mtu <= port.max_mtu);
        let table = side.context.gid_table(PORT).unwrap();
        assert_eq!(table, shown.gids);
        assert!(table.len() <= port.gid_table_len as usize);
        assert!(rank_gids(&table).contains(&&side.gid));
        if port.link_layer == LinkLayer::Ethernet {
            assert!(side.gid.net_device.is_some(), "{:?}", side.gid);
        }
    }
    assert!(
        rig.a.context.name() == rig.b.context.name()
            || rig.a.context.guid() != rig.b.context.guid()
    );
}

#[test]
fn asking_for_more_than_there_is_says_so() {
    let Some(rig) = Rig::open() else { return };
    let (context, pd) = (&rig.a.context, &rig.a.pd);
    let most = context.attributes().unwrap();
    let beyond = |error| assert!(matches!(error, VerbsError::BeyondLimits { .. }), "{error:?}");
    beyond(context.create_cq(0, None).unwrap_err());
    beyond(context.create_cq(u32::MAX, None).unwrap_err());
    beyond(pd.create_srq(SrqOptions { max_wr: most.max_srq_wr + 1, max_sge: 1 }).unwrap_err());
    let cq = context.create_cq(16, None).unwrap();
    let many = QpOptions { max_send_sge: most.max_sge + 1, ..options(&cq) };
    beyond(pd.create_qp(&many).unwrap_err());
    let mut qp = pd.create_qp(&options(&cq)).unwrap();
    let Capacities { max_send_wr, max_recv_wr, .. } = qp.capacities();
    assert!(max_send_wr >= SEND_WRS && max_recv_wr >= crate::rig::RECV_WRS);
    beyond(qp.to_init(&InitAttributes { port: 99, pkey_index: 0, access: ALL }).unwrap_err());
    assert_eq!(qp.state().unwrap(), QpState::Reset, "it stays where it was");
}

#[test]
fn things_of_different_devices_are_not_put_together() {
    let Some(rig) = Rig::open() else { return };
    let (a, b) = (&rig.a, &rig.b);
    let foreign = |error| assert!(matches!(error, VerbsError::Foreign { .. }), "{error:?}");
    let cq = b.context.create_cq(16, None).unwrap();
    foreign(a.pd.create_qp(&options(&cq)).unwrap_err());
    let channel = b.context.completion_channel().unwrap();
    foreign(a.context.create_cq(16, Some(&channel)).unwrap_err());
    let (own, other) = (a.context.create_cq(16, None).unwrap(), a.context.allocate_pd().unwrap());
    let srq = other.create_srq(SrqOptions { max_wr: 4, max_sge: 1 }).unwrap();
    foreign(a.pd.create_qp(&QpOptions { srq: Some(&srq), ..options(&own) }).unwrap_err());
}

#[test]
fn an_address_that_leads_nowhere_is_told_when_connecting() {
    let Some(rig) = Rig::open() else { return };
    if !rig.is_soft() {
        println!("not run: what a real network has a route to is not known");
        return;
    }
    let mut end = rig.a.end(vec![0; 64], ALL);
    end.qp.to_init(&InitAttributes { port: PORT, pkey_index: 0, access: ALL }).unwrap();
    let nowhere = "::ffff:192.0.2.7".parse().unwrap();
    let error = end.qp.to_rtr(&rig.a.rtr(Some(nowhere), 0, 0x11)).unwrap_err();
    println!("no route: {error}");
    let VerbsError::NoRoute { gid, gid_index, .. } = error else { panic!("{error:?}") };
    assert_eq!((gid, u32::from(gid_index)), (Some(nowhere), rig.a.gid.index));
    // It is as it was, and can be tried with another address.
    let number = end.qp.number();
    end.qp.to_rtr(&rig.a.rtr(Some(rig.b.gid.gid), 0, number)).unwrap();
    let query = end.qp.query().unwrap();
    assert_eq!((query.state, query.remote_qp_num), (QpState::ReadyToReceive, number));
    let too_many_bits = rig.a.rts(1 << 24, USUAL);
    let error = end.qp.to_rts(&too_many_bits).unwrap_err();
    assert!(matches!(error, VerbsError::BadAttribute { attribute: "sq_psn", .. }), "{error:?}");
}

#[test]
fn handles_keep_what_they_were_made_from() {
    let Some(rig) = Rig::open() else { return };
    let (mut a, b) = rig.pair();
    // Everything but the ends themselves, which were made from it, is let go first.
    drop((rig.a, rig.b));
    assert_eq!(a.write(0, 65_536, &b), Ok(()));
    assert!(b.bytes(0, 65_536) == pattern(65_536));
    let crate::rig::End { qp, cq, mr } = a;
    drop((cq, mr));
    qp.destroy().unwrap();
}

#[test]
fn a_completion_queue_that_overflows_is_told_of() {
    let Some(rig) = Rig::open() else { return };
    let small = rig.a.context.create_cq(4, None).unwrap();
    let depth = small.depth();
    let mut qp = rig.a.pd.create_qp(&options(&small)).unwrap();
    let (mut b, source) = (rig.b.end(vec![0; 4096], ALL), rig.a.pd.register(vec![1; 64], ALL));
    rig.connect(&mut qp, &mut b.qp, USUAL);
    let (sge, count) = (source.unwrap().sge(0, 0).unwrap(), u64::from(depth) + 8);
    if count > u64::from(qp.max_send_wr()) {
        println!("not run: a queue of {depth} was granted for one of 4");
        return;
    }
    let mut batch = qp.batch();
    for wr_id in 0..count {
        batch.write(wr_id, &[sge], b.mr.addr(), b.mr.rkey(), true).unwrap();
    }
    batch.post().unwrap();
    let deadline = std::time::Instant::now() + crate::rig::PATIENCE;
    loop {
        match rig.a.context.next_async_event().unwrap() {
            Some(AsyncEvent::CqError) => break,
            Some(other) => println!("event: {other:?}"),
            None => std::thread::yield_now(),
        }
        assert!(std::time::Instant::now() < deadline, "no event came");
    }
    // What had a place in it is still there.
    let mut completions = vec![Completion::EMPTY; count as usize];
    let taken = small.poll(&mut completions).unwrap_or(0);
    assert!(taken <= depth as usize, "{taken} of a queue of {depth}");
    drop(wait(&b.cq, 0));
}
