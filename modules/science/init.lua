--- Methods of the sciences on tensors: require "tycho.science".
--
--     local science = require "tycho.science"
--     local truth = science.track_simulation.draw(100000) -- electrons in a pixel detector within a magnet
--     local fitted = science.tracks.fit(truth.hits)       -- momenta, their errors and chi squared, all at once
return require "tycho.lazy"({}, {
  tracks = "tycho.science.tracks", track_simulation = "tycho.science.track_simulation",
}, "tycho.science")
