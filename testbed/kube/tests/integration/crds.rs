//! A real API server accepts `deploy/`, prints what the documentation promises, keeps users' objects as they
//! wrote them ([`objects`]), refuses bad ones with words that help ([`validation`]), holds every program to its
//! rights ([`rights`]) and to tokens of its own ([`tokens`]), takes what a user installs ([`install`]), lets no node say where it is ([`locations`]), and warns of what has no effect
//! ([`warnings`]).

mod bed;
mod install;
mod locations;
mod objects;
mod rights;
mod tokens;
mod validation;
mod warnings;
