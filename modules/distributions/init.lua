--- Probability distributions: require "tycho.distributions". Each is a file beside this one: a class whose objects say
-- how likely samples are, draw samples, and are fitted to samples.
return require "tycho.lazy" ({}, {
  VonMisesFisher = "tycho.distributions.von_mises_fisher",
}, "tycho.distributions")
