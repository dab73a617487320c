//! Engines on threads of their own.

use std::sync::mpsc;
use std::time::Duration;

use kvferry_verbs_standin::{Mode, WorldOptions};

use crate::common::{Net, Node, Queue, Setup};

/// Messages of each direction; more than any queue holds.
const MESSAGES: u64 = 500;
const DEPTH: u64 = 8;
const SLOT: usize = 64;

/// What a peer has to know.
#[derive(Clone, Copy)]
struct Card {
    attr: kvferry_verbs_standin::sys::ibv_qp_attr,
    addr: u64,
    rkey: u32,
}

/// Sends and receives `MESSAGES`, sleeping whenever there is nothing to do.
fn engine(net: &Net, device: usize, send: &mpsc::Sender<Card>, receive: &mpsc::Receiver<Card>) {
    let node = Node::new(net, device);
    let queue = Queue::new(&node, Setup::default());
    // Its own attributes name itself; each side swaps in the peer's number and address.
    let attr = queue.attributes(&queue);
    send.send(Card { attr, addr: node.addr(0), rkey: node.rkey() }).unwrap();
    let peer = receive.recv().unwrap();
    let mut attr = peer.attr;
    attr.rq_psn = queue.setup.recv_psn;
    queue.connect_with(&attr);
    (0..DEPTH).for_each(|n| assert_eq!(queue.receive(n, 0..0), 0));
    meet(send, receive, &peer);
    let (mut posted, mut done, mut arrived) = (0, 0, 0);
    while done < MESSAGES || arrived < MESSAGES {
        while posted < MESSAGES && posted - done < DEPTH {
            // The first half is for what arrives, the second for what is sent.
            let slot = (posted % DEPTH) as usize * SLOT;
            let own = slot + SLOT * DEPTH as usize..slot + SLOT * DEPTH as usize + SLOT;
            node.fill(own.clone(), posted as u8);
            let mut work = queue.write(posted, own, &node).imm(posted as u32).rkey(peer.rkey);
            work.remote_addr = peer.addr + slot as u64;
            queue.post(&[work]).unwrap();
            posted += 1;
        }
        let mut seen = node.poll();
        if seen.is_empty() {
            node.arm(false);
            seen = node.poll();
            if seen.is_empty() {
                node.sleep();
            }
        }
        for seen in seen {
            assert_eq!(seen.status, 0);
            if seen.opcode & 128 == 0 {
                assert_eq!(seen.wr_id, done);
                done += 1;
            } else {
                assert_eq!(u64::from(u32::from_be(seen.imm)), arrived);
                // The peer overwrites a slot only after this receive is posted again.
                let slot = (arrived % DEPTH) as usize * SLOT;
                assert_eq!(node.byte(slot..slot + SLOT), arrived as u8);
                assert_eq!(queue.receive(arrived, 0..0), 0);
                arrived += 1;
            }
        }
        // An event may be left of a CQ that was armed and then polled.
        node.has_event();
    }
    // The QP stays until the peer has heard its last answer.
    meet(send, receive, &peer);
}

/// Waits for the other engine to come here.
fn meet(send: &mpsc::Sender<Card>, receive: &mpsc::Receiver<Card>, card: &Card) {
    send.send(*card).unwrap();
    receive.recv().unwrap();
}

fn two_engines(mode: Mode) {
    let net = Net::new(WorldOptions::pair().with(|device| device.mode = mode));
    let net = &net;
    let ((to_b, of_a), (to_a, of_b)) = (mpsc::channel(), mpsc::channel());
    std::thread::scope(|scope| {
        scope.spawn(move || engine(net, 0, &to_b, &of_b));
        scope.spawn(move || engine(net, 1, &to_a, &of_a));
    });
}

#[test]
fn two_engines_exchange_messages_and_sleep_in_between() {
    two_engines(Mode::Immediate);
}

#[test]
fn two_engines_exchange_deferred_messages_and_are_woken_by_time() {
    two_engines(Mode::Deferred { per_poll: 3, idle: Some(Duration::from_micros(200)) });
}
