//! A real API server accepts `deploy/`, prints what the documentation promises, keeps users' objects as they
//! wrote them ([`objects`]), refuses bad ones with words that help ([`validation`]), holds every program to its
//! rights ([`rights`], [`peers`]) and to tokens of its own ([`tokens`]), takes what a user installs ([`install`]), keeps ranges of Services apart ([`ranges`]), binds what the controller writes to Nodes ([`network_unavailable`]), lets no node say where it is ([`locations`]), warns of what has no effect
//! ([`warnings`]), and bounds lists and maps without holding up objects from before ([`bounds`]).

mod bed;
mod bounds;
mod install;
mod locations;
mod network_unavailable;
mod objects;
mod peers;
mod ranges;
mod rights;
mod tokens;
mod validation;
mod warnings;
