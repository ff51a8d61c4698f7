--- Pictures of a thing that is shown and not named: diffusion.subject. A network is told in words and by features of a
-- picture; what it learns from are pairs, made without tuning on any thing, after Zhou et al. 2024, "Toffee: Efficient
-- Million-Scale Dataset Construction for Subject-Driven Text-to-Image Generation".
--
--     local features = subject.features(network):train(loader, { steps = 300 })       -- self-supervised
--     local generator = subject.network(painter, features.width)                      -- refiner and view generator
--     generator:train(...)
--     local pairs = subject.factory { painter = painter, features = features, generator = generator }:make(things)
return {
  features = require "tycho.diffusion.subject.features",
  network = require "tycho.diffusion.subject.network",
  factory = require "tycho.diffusion.subject.factory",
  words = require "tycho.diffusion.subject.words",
  segment = require "tycho.diffusion.subject.segment",
}
