use crate::forward::{Feed, Logits, ModelConfig};
use crate::target::prefix::*;

/// A model that records only the lengths of lanes and the number of copies.
struct Lengths {
    config: ModelConfig,
    lens: Vec<usize>,
    reserved: usize,
    copies: usize,
}

impl Forward for Lengths {
    fn config(&self) -> &ModelConfig {
        &self.config
    }
    fn reserve(&mut self) -> Option<Lane> {
        self.reserved += 1;
        (self.reserved <= self.lens.len()).then(|| Lane(self.reserved - 1))
    }
    fn release(&mut self, _: Lane) {}
    fn len(&self, lane: Lane) -> usize {
        self.lens[lane.0]
    }
    fn rewind(&mut self, lane: Lane, len: usize) {
        assert!(len <= self.lens[lane.0]);
        self.lens[lane.0] = len;
    }
    fn commit(&mut self, lane: Lane, base: usize, path: &[usize]) -> Result<(), ModelError> {
        self.lens[lane.0] = base + path.len();
        Ok(())
    }
    fn fork(&mut self, from: Lane, to: Lane, len: usize) -> Result<(), ModelError> {
        assert!(from != to && self.lens[to.0] == 0 && len <= self.lens[from.0]);
        self.lens[to.0] = len;
        self.copies += 1;
        Ok(())
    }
    fn run(&mut self, _: &[Feed<'_>]) -> Result<Logits, ModelError> {
        Ok(Logits::new(1))
    }
}

struct House {
    model: Lengths,
    lanes: Lanes,
}

fn house(lanes: usize) -> House {
    let config = ModelConfig { vocabulary: 1, context: 9999, lanes, eos: Vec::new(), proposes: 0 };
    House { model: Lengths { config, lens: vec![0; lanes], reserved: 0, copies: 0 }, lanes: Lanes::default() }
}

impl House {
    /// Takes a lane for the tokens and appends those that it lacks.
    fn take(&mut self, tokens: &[TokenId]) -> Option<Match> {
        let (slot, cached) = self.lanes.acquire(&mut self.model, tokens, tokens.len() - 1).unwrap()?;
        let lane = self.lanes.lane(slot).unwrap();
        assert_eq!(self.model.lens[lane.0], cached, "the lane holds the tokens reported as cached");
        self.model.lens[lane.0] = tokens.len();
        self.lanes.append(slot, &tokens[cached..]);
        Some((slot, cached))
    }

    fn serve(&mut self, tokens: &[TokenId]) -> Match {
        let got = self.take(tokens).unwrap();
        self.lanes.free(got.0);
        got
    }
}

fn text(start: TokenId, len: TokenId) -> Vec<TokenId> {
    (start..start + len).collect()
}

#[test]
fn a_conversation_finds_its_lane_again() {
    let mut house = house(3);
    let (slot, _) = house.serve(&text(0, 200));
    house.serve(&text(5000, 200));
    assert_eq!(house.serve(&text(0, 240)), (slot, 200));
    assert_eq!(house.serve(&text(0, 240)), (slot, 239), "the last token is always computed");
    assert_eq!(house.serve(&text(0, 220)), (slot, 219), "a step back is a rewind");
    assert_eq!(house.model.copies, 0);
}

#[test]
fn a_shared_prefix_is_copied_and_the_rest_of_the_lane_is_kept() {
    let mut house = house(3);
    let first = [text(0, 100), text(1000, 300)].concat();
    let second = [text(0, 100), text(2000, 300)].concat();
    house.serve(&first);
    assert_eq!((house.serve(&second).1, house.model.copies), (100, 1));
    assert_eq!(house.serve(&[first, vec![1]].concat()).1, 400);
    assert_eq!(house.serve(&[second, vec![1]].concat()).1, 400);
}

#[test]
fn a_busy_lane_is_copied_from_and_never_taken() {
    let mut house = house(2);
    let (busy, _) = house.take(&text(0, 100)).unwrap();
    let (other, cached) = house.take(&text(0, 150)).unwrap();
    assert!(other != busy && cached == 100);
    assert_eq!(house.take(&text(0, 100)), None, "all lanes are busy");
    assert_eq!(house.lanes.busy_tokens(), 250);
    house.lanes.free(busy);
    assert_eq!(house.take(&text(0, 101)), Some((busy, 100)));
}

#[test]
fn a_short_prefix_is_computed_again_rather_than_copied() {
    let mut house = house(2);
    house.serve(&[text(0, 20), text(1000, 300)].concat());
    assert_eq!((house.serve(&[text(0, 20), text(2000, 300)].concat()).1, house.model.copies), (0, 0));
}

#[test]
fn the_least_recently_used_lane_is_evicted() {
    let mut house = house(2);
    house.serve(&text(0, 100));
    house.serve(&text(1000, 100));
    house.serve(&text(0, 110));
    house.serve(&text(2000, 100));
    assert_eq!(house.serve(&text(0, 120)).1, 110);
    assert_eq!(house.serve(&text(1000, 100)).1, 0);
}

#[test]
fn a_committed_branch_is_what_the_lane_holds() {
    let mut house = house(1);
    let (slot, _) = house.take(&text(0, 50)).unwrap();
    house.model.lens[0] += 4;
    house.lanes.append(slot, &[90, 91, 92, 93]);
    house.lanes.commit(&mut house.model, slot, 50, &[1, 3]).unwrap();
    house.lanes.free(slot);
    assert_eq!(house.serve(&[text(0, 50), vec![91, 93, 7]].concat()).1, 52);
}

#[test]
fn a_lane_that_cannot_be_trusted_is_empty() {
    let mut house = house(1);
    let (slot, _) = house.take(&text(0, 50)).unwrap();
    house.lanes.discard(&mut house.model, slot);
    assert_eq!(house.serve(&text(0, 50)).1, 0);
}
