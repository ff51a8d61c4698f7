--- Datasets, loaders and readers: require "tycho".data.
local datasets = require "tycho.data.dataset"

local data = { DataLoader = require("tycho.data.loader").new }
for name, value in pairs(datasets) do data[name] = value end
for name, value in pairs(require "tycho.data.readers") do data[name] = value end

return require("tycho.lazy")(data, { transforms = "tycho.data.transforms" })
