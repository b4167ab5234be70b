//! Messages that create, change and delete a table.

use std::net::SocketAddrV4;

use fairlead_address::{Interval, IpFamily};
use nix::libc;

use super::attributes::AttributeWriter;
use super::elements::{self, Difference, Elements};
use super::operands::COUNTED_ADDRESSES;
use super::request::message;
use super::table::{Chain, EndpointMap, Rule, Table};
use super::uapi::{
    ELEMENT_INTERVAL_END, NF_ACCEPT, SET_DYNAMIC, SET_INTERVAL, SET_MAP, SET_TIMEOUT, chain, element, rule,
    set, table,
};
use super::{endpoints, timed};
use crate::{Message, Result};

/// Intervals per message: 1,000 of IPv6 take 64,000 of the 65,535 bytes an attribute can have.
const CHUNK: usize = 1000;

/// Creates the table, replacing one of the same name.
///
/// # Errors
/// An expression is longer than an attribute can be.
pub fn create(wanted: &Table) -> Result<Vec<Message>> {
    // Adding first makes the deletion succeed whether or not the table was there.
    let mut messages = vec![add_table(&wanted.name)?, delete_table(&wanted.name)?, add_table(&wanted.name)?];
    let mut numbers = 1..;
    for ((name, elements), number) in wanted.sets.iter().zip(&mut numbers) {
        let elements: Elements = elements.clone().into();
        messages.push(add_set(&wanted.name, name, elements.family(), SET_INTERVAL, number)?);
        messages.extend(element_messages(&wanted.name, name, &elements, Direction::Add)?);
    }
    for ((name, set), number) in wanted.timed.iter().zip(&mut numbers) {
        messages.push(add_set(&wanted.name, name, set.family, SET_TIMEOUT, number)?);
        messages.extend(timed::add_elements(&wanted.name, name, set)?);
    }
    for ((name, family), number) in wanted.counted_sets().into_iter().zip(&mut numbers) {
        messages.push(add_set(&wanted.name, name, family, SET_DYNAMIC, number)?);
    }
    for ((name, map), number) in wanted.maps.iter().zip(numbers) {
        messages.push(add_map(&wanted.name, name, number)?);
        messages.extend(change_map(&wanted.name, name, &EndpointMap::new(), map)?);
    }
    for (name, made) in &wanted.chains {
        messages.push(add_chain(&wanted.name, name, made)?);
        for (position, made) in made.rules.iter().enumerate() {
            messages.push(add_rule(&wanted.name, name, position, made)?);
        }
    }
    Ok(messages)
}

/// Deletes the table with everything in it; succeeds when there is none.
///
/// # Errors
/// None in practice: the name would have to be longer than an attribute can be.
pub fn delete(name: &str) -> Result<Vec<Message>> {
    Ok(vec![add_table(name)?, delete_table(name)?])
}

/// Changes the elements of one set; no message if there is no difference.
///
/// # Errors
/// None in practice: a name would have to be longer than an attribute can be.
pub fn change_elements(table: &str, set: &str, difference: &Difference) -> Result<Vec<Message>> {
    // Deletions first: a new interval may overlap one that is deleted.
    let mut messages = element_messages(table, set, &difference.deleted, Direction::Delete)?;
    messages.extend(element_messages(table, set, &difference.added, Direction::Add)?);
    Ok(messages)
}

/// Changes one map from its present to its desired elements; no message if they are the same.
///
/// # Errors
/// None in practice: a name would have to be longer than an attribute can be.
pub fn change_map(
    table: &str,
    map: &str,
    present: &EndpointMap,
    wanted: &EndpointMap,
) -> Result<Vec<Message>> {
    let not_in = |one: &EndpointMap, other: &EndpointMap| -> EndpointMap {
        let missing = |(key, port): &(&SocketAddrV4, &u16)| other.get(key) != Some(port);
        one.iter().filter(missing).map(|(key, port)| (*key, *port)).collect()
    };
    let mut messages = map_messages(table, map, &not_in(present, wanted), Direction::Delete)?;
    messages.extend(map_messages(table, map, &not_in(wanted, present), Direction::Add)?);
    Ok(messages)
}

fn map_messages(
    table_name: &str,
    map_name: &str,
    elements: &EndpointMap,
    direction: Direction,
) -> Result<Vec<Message>> {
    let entries: Vec<(&SocketAddrV4, &u16)> = elements.iter().collect();
    let chunk_message = |chunk: &[(&SocketAddrV4, &u16)]| {
        let verb = direction.verb();
        let what = format!("{verb} {} endpoints, map inet {table_name} {map_name}", chunk.len());
        message(direction.number(), direction.flags(), what, |m| {
            m.text(element::LIST_TABLE, table_name);
            m.text(element::LIST_SET, map_name);
            m.nested(element::LIST_ELEMENTS, |list| {
                for (endpoint, port) in chunk {
                    list.nested(element::LIST_ELEMENT, |e| {
                        e.nested(element::KEY, |key| {
                            key.bytes(element::DATA_VALUE, &endpoints::key(**endpoint));
                        });
                        e.nested(element::DATA, |data| {
                            data.bytes(element::DATA_VALUE, &port.to_be_bytes());
                        });
                    });
                }
            });
        })
    };
    entries.chunks(CHUNK).map(chunk_message).collect()
}

fn add_map(table_name: &str, name: &str, number: u32) -> Result<Message> {
    let what = format!("add map inet {table_name} {name}");
    message(libc::NFT_MSG_NEWSET, libc::NLM_F_CREATE, what, |m| {
        m.text(set::TABLE, table_name);
        m.text(set::NAME, name);
        m.be32(set::FLAGS, SET_MAP);
        m.be32(set::KEY_TYPE, endpoints::KEY_TYPE);
        m.be32(set::KEY_LENGTH, endpoints::KEY_LENGTH);
        m.be32(set::DATA_TYPE, endpoints::DATA_TYPE);
        m.be32(set::DATA_LENGTH, endpoints::DATA_LENGTH);
        m.be32(set::ID, number);
        // With a size the kernel takes a hash table of a fixed size. One that grows moves its elements while a long
        // dump is read, which then lacks some of them.
        m.nested(set::DESCRIPTION, |description| description.be32(set::SIZE, endpoints::CAPACITY));
    })
}

fn add_table(name: &str) -> Result<Message> {
    message(libc::NFT_MSG_NEWTABLE, libc::NLM_F_CREATE, format!("add table inet {name}"), |m| {
        m.text(table::NAME, name);
        m.be32(table::FLAGS, 0);
    })
}

fn delete_table(name: &str) -> Result<Message> {
    message(libc::NFT_MSG_DELTABLE, 0, format!("delete table inet {name}"), |m| m.text(table::NAME, name))
}

/// A set of addresses. One to which rules add them, with the number of their connections, has a size.
fn add_set(table_name: &str, name: &str, family: IpFamily, flags: u32, number: u32) -> Result<Message> {
    let what = format!("add set inet {table_name} {name}");
    message(libc::NFT_MSG_NEWSET, libc::NLM_F_CREATE, what, |m| {
        m.text(set::TABLE, table_name);
        m.text(set::NAME, name);
        m.be32(set::FLAGS, flags);
        m.be32(set::KEY_TYPE, elements::nft_type(family));
        m.be32(set::KEY_LENGTH, elements::key_length(family));
        m.be32(set::ID, number);
        if flags == SET_DYNAMIC {
            m.nested(set::DESCRIPTION, |description| description.be32(set::SIZE, COUNTED_ADDRESSES));
        }
    })
}

fn add_chain(table_name: &str, name: &str, made: &Chain) -> Result<Message> {
    let what = format!("add chain inet {table_name} {name}");
    message(libc::NFT_MSG_NEWCHAIN, libc::NLM_F_CREATE, what, |m| {
        m.text(chain::TABLE, table_name);
        m.text(chain::NAME, name);
        m.nested(chain::HOOK, |hook| {
            hook.be32(chain::HOOK_NUMBER, made.hook.number());
            hook.bytes(chain::HOOK_PRIORITY, &made.priority.to_be_bytes());
        });
        m.be32(chain::POLICY, NF_ACCEPT);
        m.text(chain::TYPE, made.hook.kind());
    })
}

fn add_rule(table_name: &str, chain_name: &str, position: usize, made: &Rule) -> Result<Message> {
    let what = format!("add rule {} of chain inet {table_name} {chain_name}", position.saturating_add(1));
    message(libc::NFT_MSG_NEWRULE, libc::NLM_F_CREATE | libc::NLM_F_APPEND, what, |m| {
        m.text(rule::TABLE, table_name);
        m.text(rule::CHAIN, chain_name);
        m.nested(rule::EXPRESSIONS, |list| {
            for expression in &made.0 {
                expression.write(list);
            }
        });
        m.bytes(rule::USERDATA, &userdata(made));
    })
}

fn userdata(made: &Rule) -> Vec<u8> {
    let value = made.fingerprint().to_be_bytes();
    [&[rule::USERDATA_FINGERPRINT, value.len() as u8], value.as_slice()].concat()
}

#[derive(Clone, Copy)]
enum Direction {
    Add,
    Delete,
}

impl Direction {
    const fn number(self) -> i32 {
        match self {
            Self::Add => libc::NFT_MSG_NEWSETELEM,
            Self::Delete => libc::NFT_MSG_DELSETELEM,
        }
    }

    const fn flags(self) -> i32 {
        match self {
            // Exclusive: an element that exists although we believe it absent means that our state is wrong.
            Self::Add => libc::NLM_F_CREATE | libc::NLM_F_EXCL,
            Self::Delete => 0,
        }
    }

    const fn verb(self) -> &'static str {
        match self {
            Self::Add => "add",
            Self::Delete => "delete",
        }
    }
}

fn element_messages(
    table_name: &str,
    set_name: &str,
    elements: &Elements,
    direction: Direction,
) -> Result<Vec<Message>> {
    let side = match direction {
        Direction::Add => "to",
        Direction::Delete => "from",
    };
    let chunk_message = |chunk: &[Interval]| {
        let summary = elements::summary(elements.family(), chunk);
        let what = format!("{} {summary} {side} set inet {table_name} {set_name}", direction.verb());
        message(direction.number(), direction.flags(), what, |m| {
            m.text(element::LIST_TABLE, table_name);
            m.text(element::LIST_SET, set_name);
            m.nested(element::LIST_ELEMENTS, |list| {
                for interval in chunk {
                    write_interval(list, elements.family(), *interval);
                }
            });
        })
    };
    elements.intervals().chunks(CHUNK).map(chunk_message).collect()
}

fn write_interval(list: &mut AttributeWriter, family: IpFamily, interval: Interval) {
    for (address, is_end) in elements::of_interval(family, interval) {
        list.nested(element::LIST_ELEMENT, |e| {
            if is_end {
                e.be32(element::FLAGS, ELEMENT_INTERVAL_END);
            }
            e.nested(element::KEY, |key| key.bytes(element::DATA_VALUE, &elements::key(family, address)));
        });
    }
}

#[cfg(test)]
mod tests {
    use fairlead_address::IntervalSet;

    use super::*;

    fn many(family: IpFamily, count: u128) -> IntervalSet {
        let single = |n| Interval { first: n * 2, last: n * 2 };
        IntervalSet::from_intervals(family, (0..count).map(single).collect())
    }

    #[test]
    fn full_chunks_fit_an_attribute() {
        for family in [IpFamily::V4, IpFamily::V6] {
            let messages = element_messages("t", "s", &many(family, 2500).into(), Direction::Add).unwrap();
            assert_eq!(messages.len(), 3);
            assert!(messages.iter().all(|m| m.payload.len() < 65_600));
        }
    }

    #[test]
    fn texts_name_the_operation_and_the_object() {
        let one = IntervalSet::from_prefixes(IpFamily::V4, &["10.1.0.0/24".parse().unwrap()]);
        let change = |present: &IntervalSet, wanted: &IntervalSet| {
            change_elements("t", "s", &Elements::from(present.clone()).difference(wanted)).unwrap()
        };
        let messages = change(&one, &many(IpFamily::V4, 2));
        let texts: Vec<&str> = messages.iter().map(|m| m.what.as_str()).collect();
        assert_eq!(
            texts,
            [
                "delete 10.1.0.0/24 from set inet t s",
                "add 2 intervals from 0.0.0.0 to 0.0.0.2 to set inet t s"
            ]
        );
        assert!(change(&one, &one).is_empty());
        assert_eq!(change(&IntervalSet::empty(IpFamily::V4), &one).len(), 1);
    }

    #[test]
    fn the_last_interval_has_no_end() {
        let all = IntervalSet::from_prefixes(IpFamily::V4, &["0.0.0.0/0".parse().unwrap()]);
        let message = element_messages("t", "s", &all.into(), Direction::Add).unwrap().remove(0);
        // struct nfgenmsg, table "t", set "s", list (4) of one element (4) of one key (4) of one value (4 + 4)
        assert_eq!(message.payload.len(), 4 + 8 + 8 + 4 + 4 + 4 + 8);
    }
}
