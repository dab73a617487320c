//! Bytes that arrive, and what is said of it.

use kvferry_verbs_standin::{POISON, WorldOptions, sys};
use sys::ibv_wc_opcode as wc;
use sys::ibv_wc_status as status;

use crate::common::{
    INLINE, Net, Node, Queue, SIGNALED, Setup, Work, connected, connected_as, statuses,
};

const WITH_IMM: u32 = sys::ibv_wc_flags::IBV_WC_WITH_IMM.0;

#[test]
fn a_write_gathers_and_lands_where_it_says() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, _qb) = connected(&a, &b);
    a.fill(0..100, 1);
    a.fill(5000..5050, 2);
    b.fill(0..400, 9);
    let sges = vec![a.sge(0..100), a.sge(5000..5050)];
    qa.post(&[Work { sges, remote_addr: b.addr(200), ..qa.write(5, 0..0, &b) }]).unwrap();
    let seen = a.poll();
    assert_eq!(seen.len(), 1);
    assert_eq!((seen[0].wr_id, seen[0].status), (5, status::IBV_WC_SUCCESS));
    assert_eq!((seen[0].opcode, seen[0].qp_num), (wc::IBV_WC_RDMA_WRITE, qa.number()));
    assert_eq!((b.byte(200..300), b.byte(300..350)), (1, 2));
    assert_eq!((b.byte(0..200), b.byte(350..400)), (9, 9));
    assert_eq!(b.poll(), []);
}

#[test]
fn a_read_scatters() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, _qb) = connected(&a, &b);
    b.fill(0..10, 3);
    b.fill(10..20, 4);
    let sges = vec![a.sge(100..115), a.sge(40..45)];
    qa.post(&[Work { sges, ..qa.read(6, 0..0, &b) }]).unwrap();
    let seen = a.poll();
    assert_eq!((seen[0].status, seen[0].opcode, seen[0].bytes), (0, wc::IBV_WC_RDMA_READ, 20));
    assert_eq!((a.byte(100..110), a.byte(110..115), a.byte(40..45)), (3, 4, 4));
}

#[test]
fn an_immediate_takes_a_receive_and_arrives_in_network_order() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, qb) = connected(&a, &b);
    assert_eq!(qb.receive(70, 0..0), 0);
    a.fill(0..30, 7);
    qa.post(&[qa.write(1, 0..30, &b).imm(0x1234_5678)]).unwrap();
    assert_eq!(statuses(&a.poll()), [(1, 0)]);
    let seen = b.poll();
    assert_eq!(seen.len(), 1);
    assert_eq!((seen[0].wr_id, seen[0].bytes, seen[0].flags), (70, 30, WITH_IMM));
    assert_eq!(u32::from_be(seen[0].imm), 0x1234_5678);
    assert_eq!((seen[0].opcode, seen[0].qp_num), (wc::IBV_WC_RECV_RDMA_WITH_IMM, qb.number()));
    assert_eq!(b.byte(0..30), 7);
}

#[test]
fn a_message_lands_in_its_receive() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, qb) = connected(&a, &b);
    assert_eq!(qb.receive(70, 1000..1100), 0);
    assert_eq!(qb.receive(71, 2000..2100), 0);
    a.fill(0..80, 5);
    qa.post(&[qa.send(1, 0..80), qa.send(2, 0..10).imm(9)]).unwrap();
    assert_eq!(statuses(&a.poll()), [(1, 0), (2, 0)]);
    let seen = b.poll();
    assert_eq!((seen[0].wr_id, seen[0].bytes, seen[0].flags), (70, 80, 0));
    assert_eq!((seen[1].wr_id, seen[1].bytes, seen[1].flags), (71, 10, WITH_IMM));
    assert_eq!(u32::from_be(seen[1].imm), 9);
    assert_eq!((b.byte(1000..1080), b.byte(1080..1100), b.byte(2000..2010)), (5, 0, 5));
}

#[test]
fn inline_bytes_are_those_at_the_time_of_posting() {
    let net = Net::new(WorldOptions::pair());
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, qb) = connected(&a, &b);
    net.world.hold(0, qa.number());
    a.fill(0..64, 1);
    let mut work = qa.write(1, 0..40, &b).flags(SIGNALED | INLINE);
    work.sges[0].lkey = 0;
    work.sges.push(sys::ibv_sge { lkey: 0, ..a.sge(50..60) });
    qa.post(&[work]).unwrap();
    a.fill(0..64, 2);
    net.world.release(0, qa.number());
    assert_eq!(statuses(&a.poll()), [(1, 0)]);
    assert_eq!((b.byte(0..50), b.byte(50..60)), (1, 0));
    // More than the QP was made for, and a read, are refused.
    let refused = qa.post(&[qa.write(2, 0..65, &b).flags(SIGNALED | INLINE)]);
    assert_eq!(refused, Err((0, libc::EINVAL)));
    let refused = qa.post(&[qa.read(2, 0..8, &b).flags(SIGNALED | INLINE)]);
    assert_eq!(refused, Err((0, libc::EINVAL)));
    drop(qb);
}

#[test]
fn requests_of_one_qp_take_effect_in_order() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, _qb) = connected(&a, &b);
    let list: Vec<_> = (0..10u64)
        .map(|n| {
            let from = n as usize * 10;
            a.fill(from..from + 10, n as u8);
            Work { remote_addr: b.addr(0), ..qa.write(n, from..from + 10, &b) }
        })
        .collect();
    qa.post(&list).unwrap();
    assert_eq!(statuses(&a.poll()), (0..10).map(|n| (n, 0)).collect::<Vec<_>>());
    assert_eq!(b.byte(0..10), 9);
}

#[test]
fn unsignaled_requests_complete_without_a_word() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, _qb) = connected(&a, &b);
    a.fill(0..30, 1);
    let quiet = qa.write(1, 0..10, &b).flags(0);
    qa.post(&[quiet, qa.write(2, 10..20, &b), qa.write(3, 20..30, &b).flags(0)]).unwrap();
    assert_eq!(statuses(&a.poll()), [(2, 0)]);
    assert_eq!(b.byte(0..30), 1);
}

#[test]
fn a_message_of_no_bytes_needs_no_key() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, qb) = connected(&a, &b);
    qb.receive(70, 0..0);
    let nothing = Work { sges: Vec::new(), ..qa.write(1, 0..0, &b).rkey(0).imm(4) };
    qa.post(&[nothing]).unwrap();
    assert_eq!(statuses(&a.poll()), [(1, 0)]);
    assert_eq!((b.poll()[0].bytes, qb.state()), (0, sys::ibv_qp_state::IBV_QPS_RTS));
}

#[test]
fn fields_that_the_manual_leaves_undefined_hold_nonsense() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, qb) = connected(&a, &b);
    qb.receive(70, 0..10);
    qa.post(&[qa.write(1, 0..10, &b), qa.send(2, 0..10)]).unwrap();
    let sent = a.poll();
    assert_eq!((sent[0].bytes, sent[0].imm, sent[0].flags), (POISON, POISON, 0));
    assert_eq!(b.poll()[0].imm, POISON);
    qa.post(&[qa.write(3, 0..10, &b).rkey(1)]).unwrap();
    let failed = a.poll()[0];
    assert_eq!((failed.wr_id, failed.qp_num), (3, qa.number()));
    let undefined = [failed.opcode, failed.bytes, failed.imm, failed.flags];
    assert_eq!(undefined, [POISON; 4]);
    assert_ne!(POISON & WITH_IMM, 0, "a reader of the flags sees an immediate");
}

#[test]
fn qps_of_equal_numbers_on_two_devices_are_told_apart() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let pairs: Vec<_> = (0..6).map(|_| connected(&a, &b)).collect();
    let of_a: Vec<_> = pairs.iter().map(|(qa, _)| qa.number()).collect();
    let of_b: Vec<_> = pairs.iter().map(|(_, qb)| qb.number()).collect();
    assert!(of_a.iter().any(|number| of_b.contains(number)), "{of_a:?} {of_b:?}");
    assert!(of_a.iter().zip(&of_b).all(|(a, b)| a != b));
    for (n, (qa, qb)) in pairs.iter().enumerate() {
        qb.receive(n as u64, 0..0);
        qa.post(&[qa.write(n as u64, 0..8, &b).imm(n as u32)]).unwrap();
        let (sent, arrived) = (a.poll()[0], b.poll()[0]);
        assert_eq!((sent.wr_id, sent.qp_num), (n as u64, qa.number()));
        assert_eq!((u32::from_be(arrived.imm), arrived.qp_num), (n as u32, qb.number()));
    }
}

#[test]
fn a_device_reaches_itself() {
    let net = Net::pair();
    let a = Node::new(&net, 0);
    let (qa, _qb) = connected(&a, &a);
    a.fill(0..10, 6);
    let to = Work { remote_addr: a.addr(500), ..qa.write(1, 0..10, &a) };
    qa.post(&[to]).unwrap();
    assert_eq!((statuses(&a.poll()), a.byte(500..510)), (vec![(1, 0)], 6));
    // Even one QP reaches itself, and breaks once.
    let own = Queue::new(&a, Setup::default());
    own.connect(&own);
    own.post(&[own.write(2, 0..8, &a), own.write(3, 0..8, &a).rkey(0), own.write(4, 0..8, &a)])
        .unwrap();
    let expected = [(2, 0), (3, status::IBV_WC_REM_ACCESS_ERR), (4, status::IBV_WC_WR_FLUSH_ERR)];
    assert_eq!(statuses(&a.poll()), expected);
}

#[test]
fn bytes_can_be_left_where_they_are_and_all_else_stays_the_same() {
    let net = Net::new(WorldOptions::pair().with(|device| device.moves_bytes = false));
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let (qa, qb) = connected(&a, &b);
    qb.receive(70, 0..0);
    a.fill(0..10, 6);
    qa.post(&[qa.write(1, 0..10, &b).imm(1), qa.write(2, 0..10, &b).rkey(0)]).unwrap();
    assert_eq!(statuses(&a.poll()), [(1, 0), (2, status::IBV_WC_REM_ACCESS_ERR)]);
    assert_eq!((b.poll()[0].bytes, b.byte(0..10)), (10, 0));
}

#[test]
fn psns_wrap_around() {
    let net = Net::pair();
    let (a, b) = (Node::new(&net, 0), Node::new(&net, 1));
    let last = 0xff_ffff;
    let setup = Setup { send_psn: last, recv_psn: last, ..Setup::default() };
    let (qa, _qb) = connected_as(&a, &b, setup);
    qa.post(&[qa.write(1, 0..5000, &b), qa.write(2, 0..10, &b), qa.read(3, 0..3000, &b)]).unwrap();
    assert_eq!(statuses(&a.poll()), [(1, 0), (2, 0), (3, 0)]);
}
